"""Whatever this package puts in the place of a method takes the arguments that the method takes."""

import inspect

from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_d9m.attribute_patches import AttributePatches

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def accepts(replacement, original):
    """Return whether all arguments of one function can be passed to another, in both ways."""
    taken = inspect.signature(replacement, follow_wrapped=False)
    parameters = inspect.signature(original).parameters.values()
    places = [p for p in parameters if p.kind in _BY_POSITION]
    names = {p.name: None for p in parameters if p.kind in _BY_NAME}
    first = [p for p in places if p.kind not in _BY_NAME]
    rest = {name: None for name in names if name not in {p.name for p in places}}
    try:
        taken.bind(*[None] * len(places), **rest)
        taken.bind(*[None] * len(first), **names)
    except TypeError:
        return False
    return True


def test_the_check_detects():
    assert accepts(lambda *args, **words: None, lambda a, *, b: None)
    assert accepts(lambda a, b=None: None, lambda a, b: None)
    assert not accepts(lambda x: None, lambda function: None)
    assert not accepts(lambda a: None, lambda a, b: None)


def test_every_replaced_method_of_a_training(fit, tmp_path, monkeypatch):
    replaced = []  # (owner, name, original, replacement)
    replace = AttributePatches.replace

    def noted(self, owner, name, value):
        original = getattr(owner, name, None)
        if inspect.ismethod(original) and callable(value):
            replaced.append((type(owner).__name__, name, original, value))
        return replace(self, owner, name, value)

    monkeypatch.setattr(AttributePatches, "replace", noted)
    saved = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, save_top_k=-1)
    words = {"trainer_callbacks": [saved], "trainer_enable_checkpointing": True}
    fit(probes="all", **words)
    names = {name for _, name, _, _ in replaced}
    assert {"run", "process_dataloader", "training_step", "backward", "validation_step"} <= names
    refused = [entry[:2] for entry in replaced if not accepts(*entry[:1:-1])]
    assert refused == []
