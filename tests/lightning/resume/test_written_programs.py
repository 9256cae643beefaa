"""Programs that Hypothesis writes: state of any kind, at any place, that any hook changes.

A resumed run is equal to a straight one, or refused, or ended at the first step that differs.
It never differs without a word. ``python tests/support/written_programs.py SEED COUNT FOLDER``
counts what becomes of many.
"""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from written_programs import (
    CHECKED,
    DRAWS,
    ENDS,
    HOOKS,
    KINDS,
    PLACES,
    STEPS,
    judge,
    resume,
    train,
    write,
)

# With `--hypothesis-profile=search` many. (Hypothesis prints blobs wherever CI is set.)
EXAMPLES = 6 if settings().derandomize else 3000

EQUAL = [
    *(("list", "a helper class"), ("tensor", "a function"), ("list", "a partial")),
    *(("list", "a method"), ("dict", "a map"), ("object", "a variable of the context")),
    *(("closure", "an optimizer's schedule"), ("rows", "a callback"), ("frozen", "a module")),
    *(("method", "the class of the model"), ("enum key", "a list")),
    *(("shared", "a dataset"), ("changed in a set", "a module")),
    *(("list", "a hook of a module"), ("dict", "a property"), ("tensor", "a running generator")),
    *(("sparse", "arguments"), ("python", "an optimizer"), ("list", "a scheduler")),
    *(("date", "a callback"), ("frozen set", "a file"), ("uuid", "an array"), ("slice", "a list")),
    *(("list", "a cache"), ("list", "a parameter"), ("object", "the Trainer")),
    *(("tensor", "a member"), ("structured", "a module"), ("frozen", "arguments")),
    *(("new tensor", "an optimizer"), ("list", "hyperparameters"), ("deque", "an alias")),
    *(("pair", "a namespace"), ("described", "a parameter")),
    *(
        ("dict", "a schedule's closure"),
        ("array of objects", "a module"),
        ("new tensor", "an array"),
    ),
]


@pytest.mark.parametrize(("kind", "place"), EQUAL)
def test_state_at_unusual_places_is_restored(tmp_path, new_process, kind, place):
    step = STEPS[EQUAL.index((kind, place)) % len(STEPS)]  # each kind of checkpoint in turn
    assert resume(write(kind, place), tmp_path, step) is True


REFUSED = [
    *(("text", "a module"), ("own text", "a module"), ("file", "a module"), ("map", "a dict")),
    *(("memory", "a dataset"), ("value", "a callback"), ("ctypes", "a list"), ("range", "a file")),
    *(("objects", "a callback"), ("generator", "a closure")),
    *(("simple queue", "an object"), ("thread", "a module"), ("cycle", "a hook of a module")),
    *(("enumerate", "a property"), ("byte array", "an exception")),
]


@pytest.mark.parametrize(("kind", "place"), REFUSED)
def test_what_has_no_plain_form_is_refused(tmp_path, new_process, kind, place):
    error = resume(write(kind, place), tmp_path, 5, checked=False)
    (_, get) = PLACES[place]
    name = {"a dataset": "0.dataset", "a file": "written.KEPT", "a closure": "kept"}
    name |= {"a hook of a module": "hooks()[0].keywords['kept']", "an exception": "model.kept"}
    name |= {"a property": "args[0]"}
    assert name.get(place, get.partition(".")[2].partition("[")[0]) in str(error)
    assert "0x" not in str(error)


def test_what_nothing_can_read_is_accepted_by_name_or_checked(tmp_path, new_process):
    source = write("generator", "a module") + "model.kept.close()\nmodel.kept = [keep_open()]\n"
    source = source.replace("def put(", "def keep_open():\n    yield\n\ndef put(")
    source = source.replace("number = next(kept)", "number = 1")
    assert resume(source, tmp_path / "checked", 5) is True
    error = resume(source, tmp_path, 5, checked=False)
    assert "Nothing can read model.kept[0]" in str(error)
    for accepted in ("model.*", "model.kept[0]"):
        train(source, tmp_path, 5, accepted_unknown=accepted)


SAMPLES = "Data, '__getitem__'"


@pytest.mark.parametrize(
    ("word", "kind", "place", "hook", "draws", "end"),
    [
        ("equal", "list", "a module", "Model, 'training_step'", {}, "killed"),
        ("refused", "file", "a module", "Steering, 'on_train_batch_start'", {}, ""),
        ("refused", "range", "a dataset", SAMPLES, {"loading": "persistent workers"}, ""),
        (
            "said",
            "nothing",
            "a list",
            "torch.optim.lr_scheduler.LambdaLR, 'get_lr'",
            {},
            "max_steps",
        ),
        ("refused", "list", "a dataset", SAMPLES, {"loading": "new data"}, ""),
    ],
)
def test_forks_tell_what_becomes_of_a_program(tmp_path, word, kind, place, hook, draws, end):
    found, error = judge(write(kind, place, hook, **draws), tmp_path / "runs", 3, end)
    assert found == word, error


@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(sorted(KINDS)),
    place=st.sampled_from(sorted(PLACES)),
    hook=st.sampled_from(HOOKS),
    step=st.sampled_from(STEPS),
    draws=st.fixed_dictionaries(
        {name: st.sampled_from(sorted(own)) for name, own in DRAWS.items()}
    ),
    end=st.sampled_from(ENDS),
)
def test_a_program_is_resumed_exactly_or_refused(tmp_path, kind, place, hook, step, draws, end):
    if place in CHECKED:
        draws["begin"] = end = ""
    word, _ = judge(write(kind, place, hook, **draws), tmp_path / "runs", step, end)
    assert word != "silent"
