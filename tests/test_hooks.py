"""A private name of another library that has moved is an error that names it."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import lightning_d9m
from lightning_d9m import HookMissingError, deterministic, hooks
from lightning_d9m.engine.control import doctor

ROWS = list(hooks.list_hooks())
# Without those that the installed releases are too old to have.
EXPECTED = [hook for hook in ROWS if hooks.has_release(hook)]
# Of Python itself and of our own objects.
OURS = {"_getframe", "_exit", "_fields", "_asdict", "_replace", "_initializing"}
# The name has a public meaning: torch documents it, or its value is data.
DOCUMENTED = {
    "_torchdynamo_disable",
    "_is_device_backend_autoload_enabled",
    "_ddp_params_and_buffers_to_ignore",
}


class Without:
    def __init__(self, owner, path, name):
        self.__dict__.update(owner=owner, path=path, name=name)

    def __getattr__(self, name):
        first, *rest = self.path or [None]
        if not self.path and name == self.name:
            raise AttributeError(name)
        part = getattr(self.owner, name)
        return Without(part, rest, self.name) if name == first else part


@pytest.mark.parametrize("hook", EXPECTED, ids=str)
def test_a_name_is_found_and_missed_once_its_owner_lacks_it(hook):
    assert hooks.find_missing([hook]) == []
    parts = [*filter(None, hook.owner.split("."))]

    def load(module):
        return Without(import_module(module), parts, hook.name)

    assert hooks.find_missing([hook], load) == [hook]
    with pytest.raises(HookMissingError, match=rf"lacks {hook}, .* tested with torch 2\.4 to"):
        hooks.raise_missing(hook)


def test_a_session_refuses_a_torch_whose_loaders_have_another_method(monkeypatch):
    loader = torch.utils.data.DataLoader
    monkeypatch.setattr(hooks, "_checked", set())
    monkeypatch.setattr(loader, "_make_iterator", loader._get_iterator, raising=False)
    monkeypatch.delattr(loader, "_get_iterator")
    before = torch.get_rng_state()
    for _ in range(2):  # the second session is refused, too
        with pytest.raises(HookMissingError) as caught, deterministic():
            pass
    assert caught.value.name == "torch.utils.data.dataloader.DataLoader._get_iterator"
    assert caught.value.version == torch.__version__
    assert torch.equal(before, torch.get_rng_state())
    names = next(result for result in doctor.find_problems() if result.name == "private names")
    assert names.status == "problem"
    assert "DataLoader._get_iterator" in names.found


def test_a_module_whose_import_a_program_forbids_is_not_checked(monkeypatch):
    monkeypatch.setattr(hooks, "_checked", set())
    monkeypatch.setitem(sys.modules, "torchmetrics.metric", None)
    hooks.check_hooks()


def test_a_name_that_an_older_release_lacks_is_not_missed_there(monkeypatch):
    hook = hooks.Hook("torch", "", "_a_name_of_2_13", "test", "2.13")
    monkeypatch.setattr(torch, "__version__", "2.12.1+cpu")
    assert hooks.find_missing([hook]) == []
    monkeypatch.setattr(torch, "__version__", "2.13.0a0")
    assert hooks.find_missing([hook]) == [hook]


def list_names(node):
    """Yield the attributes of other objects that an expression reads, sets or replaces."""
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
        yield node.attr
    called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    if called.endswith(("getattr", "setattr", "replace", "replace_method", "wrap_method")):
        texts = (part.value for part in node.args[1:3] if isinstance(part, ast.Constant))
        yield from (text for text in texts if isinstance(text, str) and text.isidentifier())
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning."):
        yield from (name.name for name in node.names)


def test_every_private_name_of_another_library_is_in_the_table():
    trees = {
        path: ast.parse(path.read_text())
        for path in Path(lightning_d9m.__file__).parent.rglob("*.py")
    }
    own = OURS | DOCUMENTED
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.update({node.attr} if ast.unparse(node.value) in ("self", "cls") else ())
    known = {hook.name for hook in ROWS} | {"_MultiProcessingLauncher"}  # an owner
    # As an operation of torch.ops, which raises by itself, or a module.
    known |= {"_C", "_autograd", "_weight_norm_differentiable_backward", "_to_copy"}
    used = {
        (f"{path.name}:{node.lineno}: {ast.unparse(node)}", name)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        for name in list_names(node)
        if name.startswith("_") and not name.startswith("__")
    }
    unknown = sorted(place for place, name in used if name not in known | own)
    assert not unknown, "\n".join(unknown)
    assert {"_get_iterator", "_version", "_handle"} <= {name for _, name in used}
    # One file alone touches what is private in Lightning, but for names that torch has, too.
    libraries = {"lightning", "lightning_fabric", "pytorch_lightning"}
    names = {hook.name for hook in ROWS if hook.library in libraries and hook.name[0] == "_"}
    names -= {hook.name for hook in ROWS if hook.library not in libraries} | own
    files = {place.partition(":")[0] for place, name in used if name in names}
    assert files == {"lightning_private.py"}


LAUNCHER = """
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher as own
original = own.launch
from lightning_d9m import DeterminismCallback
callbacks = [DeterminismCallback(), DeterminismCallback()]
while callbacks:
    assert own.launch is not original
    callbacks.pop()
assert own.launch is original
"""


def test_lightnings_launcher_is_restored_with_the_last_callback(forking_python):
    subprocess.run([forking_python, "-c", LAUNCHER], check=True)


def test_the_first_check_of_a_process_covers_what_is_loaded(monkeypatch):
    checked = set()
    monkeypatch.setattr(hooks, "_checked", checked)
    hooks.check_hooks()
    assert checked == {hook.module for hook in ROWS} & sys.modules.keys()
