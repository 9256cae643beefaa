"""A checkpoint that anybody may have written changes data of the program, and nothing else."""

import builtins
import enum
import random
import sys
from functools import cached_property
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_d9m.engine.control.seeding import decode_rng
from lightning_d9m.engine.state.changes import Changes
from lightning_d9m.engine.state.object_digest import digest_data
from lightning_d9m.engine.state.plain_data import encode_plain, pack_bytes


class Form(tuple):
    """The name and the content of a form, which a file may have."""

    __slots__ = ()


def encode(entry):
    return encode_plain(entry, lambda own: own if isinstance(own, Form) else None)


CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, property, cached_property)
CALLS = []


class Color(enum.Enum):
    RED = 1
    BLUE = 2


def make_closure(*held):
    def call(*arguments):
        CALLS.append((*held, *arguments))

    return call


class Slotted:
    __slots__ = ("size",)


class Model(torch.nn.Module):
    """Has code of each sort beside its data."""

    rate, color = 0.1, Color.RED

    def __init__(self):
        super().__init__()
        self.layer, self.items, self.seen = torch.nn.Linear(1, 1), [1, make_closure()], {"a": 2}
        self.slotted, self.hook, self.generator = Slotted(), make_closure(3), random.Random(1)
        self.array, self.count = np.zeros(2), 0
        self.register_forward_hook(make_closure(4))

    @property
    def lr(self):
        return self.rate

    @lr.setter
    def lr(self, value):
        CALLS.append(value)

    @cached_property
    def table(self):
        return CALLS.append(self)

    def train_step(self):
        CALLS.append(self)


def make_program():
    """Return a file of a program, the owners in it, and the changes in them."""
    file = sys.modules["program"] = ModuleType("program")
    file.__file__ = __file__
    vars(file).update(report=make_closure(5), size=3, model=Model(), path=sys.path, losses=[0.5])
    kind = type("Kind", (Model,), {"level": 1, "__module__": "program"})
    owners = {"model": file.model, "Kind": kind, "program": file}
    return owners, Changes(owners, leave_out=lambda path, _: path == "model.layer")


def list_parts(value):
    """Return the parts of an object by name."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if isinstance(value, FunctionType):
        return {name: own.cell_contents for name, own in enumerate(value.__closure__ or ())}
    names = getattr(type(value), "__slots__", ())
    return {**getattr(value, "__dict__", {}), **{n: getattr(value, n, None) for n in names}}


def find_code(owners):
    """Return the code that objects hold, by the identity of the holder and name."""
    found, seen, pending = {}, {}, [*owners.values(), vars(builtins)]
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        for name, part in list_parts(value).items():
            if isinstance(part, CODE):
                found[id(value), name] = part
            if value is not vars(builtins) and not isinstance(part, type | ModuleType):
                pending.append(part)
    return found


WORDS = """
print report model rate lr table train_step forward __class__ __dict__ __init__ __code__ call held
_forward_hooks _modules hook size count items level color seen training open mro
"""
PATHS = """
model model.items model.seen model.layer model.slotted model.hook model.generator Kind model.array
program program.path program.report program.losses model._modules model.count
"""
NAMES = st.sampled_from(WORDS.split())
PLACES = st.sampled_from(PATHS.split()) | NAMES
VALUES = st.recursive(
    st.none() | st.integers(-1, 3) | st.text(max_size=2) | st.builds(torch.ones, st.integers(0, 2)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc"), inner, max_size=2),
    max_leaves=4,
)
RESOLVED = [
    *(["subprocess", "os"], ["os", "system"], ["builtins", "exec"], ["enum", "Enum"]),
    *(["program", "Model"], [__name__, "Color"], ["torch", "Generator"]),
]
MEMBERS = st.sampled_from(["system", "RED", "mro", "__init__", "__subclasses__"])
FORMS = st.recursive(
    VALUES
    | PLACES.map(lambda path: Form(("known", path)))
    | st.tuples(st.sampled_from(RESOLVED), MEMBERS).map(lambda own: Form(("enum", [*own])))
    | st.tuples(
        st.sampled_from(["torch", "numpy", "legacy", "python", "os"]),
        st.sampled_from(["", "cpu", "cuda", "meta", "default_rng", "PCG64", "Philox", "bytes"]),
        VALUES | VALUES.map(encode_plain),
    ).map(lambda own: Form(("generator", [[*own[:2]], own[2]]))),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(NAMES | st.integers(0, 3), inner, max_size=3)
        | st.tuples(PLACES, st.lists(inner, max_size=2)).map(lambda own: Form(("record", [*own])))
        | inner.map(lambda form: Form(("shared", ["model", 0, encode(form)])))
        | st.tuples(
            st.just("subclass"),
            st.tuples(
                st.sampled_from(["defaultdict", "OrderedDict", "Counter", "Kind"]),
                st.sampled_from([None, "list", "int", "eval"]),
                st.lists(st.lists(inner, min_size=2, max_size=2), max_size=2),
                st.dictionaries(NAMES, inner, max_size=1),
            ).map(list),
        ).map(Form)
        | st.tuples(st.sampled_from(["digest", "evaluate"]), inner).map(Form)
        | st.tuples(st.sampled_from(["value", "objects"]), st.lists(inner, max_size=2)).map(Form)
    ),
    max_leaves=5,
)
KEYS = NAMES.map(lambda own: [own]) | st.just([]) | VALUES
ENTRIES = st.tuples(PLACES, KEYS, FORMS) | st.tuples(PLACES, KEYS)


@settings(max_examples=150, deadline=None)
@given(entries=st.lists(ENTRIES | VALUES, min_size=1, max_size=4))
def test_a_hostile_checkpoint_calls_nothing_and_writes_no_code(entries):
    owners, changes = make_program()
    before, places, path = find_code(owners), {*PATHS.split()}, [*sys.path]
    captured = {f"{number}": encode(own) for number, own in enumerate(entries)}
    missing = changes.restore(captured, torch.device("cpu"))
    after = find_code(owners)
    # What data replaced or removed is gone, and no code is where none was, nor other code.
    for place, part in after.items():
        moved = isinstance(place[1], int) and part in before.values()  # within a list
        assert before.get(place) is part or moved
    assert {place for place in before.keys() - after if place[1] not in ("hook", 1)} == set()
    assert CALLS == []
    assert sys.path == path
    written = [own for name, own in zip(captured, entries, strict=True) if name not in missing]
    assert all(own[0] in places for own in written)
    assert isinstance(owners["model"], Model)


SPOILED = {
    "a function of Python": ("program", "print", 1),
    "a function of the file": ("program", "report", 1),
    "a method": ("model", "train_step", 1),
    "a method of the class": ("Kind", "train_step", 1),
    "a property": ("model", "lr", 1),
    "the class": ("model", "__class__", Form(("known", "Kind"))),
    "the attributes": ("model", "__dict__", {"rate": 1}),
    "hooks": ("model", "_forward_hooks", {}),
    "defaults": ("model.hook", "__defaults__", (1,)),
    "what is left out": ("model.layer", "in_features", 2),
    "an item": ("program.path", None, ["evil"]),
    "a list by a dict": ("model.seen", None, [1]),
    "a list by an object": ("model.items", None, Form(("known", "model"))),
    "a function elsewhere": ("model", "count", Form(("known", "model.hook"))),
    "a class": ("model", "count", Form(("known", "Kind"))),
    "a file": ("model", "count", [Form(("known", "program"))]),
    "no enum": ("model", "count", Form(("enum", [["subprocess", "os"], "system"]))),
    "a method of an enum": ("model", "count", Form(("enum", [[__name__, "Color"], "mro"]))),
    "no generator": ("model", "count", Form(("generator", [["numpy", "default_rng"], {}]))),
    "a record of a class": ("model", "count", Form(("record", ["Kind", []]))),
    "no value": ("model", "count", Form(("value", ["eval", ["1"]]))),
    "no number": ("model", "count", Form(("value", ["Decimal", ["x"]]))),
    "code in an array": ("model", "count", Form(("objects", [[1], [Form(("known", "Kind"))]]))),
    "code in a dict": (
        *("model", "count"),
        Form(("subclass", ["OrderedDict", None, [["a", Form(("known", "Kind"))]], {}])),
    ),
    "a dict with another method": (
        *("model", "count"),
        Form(("subclass", ["OrderedDict", None, [], {"items": 1}])),
    ),
    "a factory of the program": (
        "model",
        "count",
        Form(("subclass", ["defaultdict", "Model", [], {}])),
    ),
    "a factory of another type": (
        "model",
        "count",
        Form(("subclass", ["Counter", "dict", [], {}])),
    ),
    "no dict": ("model", "count", Form(("subclass", ["Model", None, [], {}]))),
    "no form": ("model", "count", Form(("evaluate", "1"))),
}


@pytest.mark.parametrize(("place", "name", "form"), SPOILED.values(), ids=SPOILED)
def test_what_is_no_data_of_the_program_is_refused_and_left(place, name, form):
    owners, changes = make_program()
    before, path = find_code(owners), [*sys.path]
    data = encode([place, [] if name is None else [name], form])
    assert changes.restore({"it": data}, torch.device("cpu")) == ["it"]
    assert (find_code(owners), sys.path, owners["model"].seen) == (before, path, {"a": 2})


@pytest.mark.parametrize("name", ["MT19937", "Philox"])
def test_a_position_outside_of_a_generator_is_refused(name):
    """NumPy would read memory there, and end the process."""
    _, changes = make_program()
    state = getattr(np.random, name)(1).state
    holder = state if name == "Philox" else state["state"]
    holder["buffer_pos" if name == "Philox" else "pos"] = -(10**9)
    form = Form(("generator", [["numpy", name], encode_plain(state)]))
    data = encode(["model", ["count"], form])
    assert changes.restore({"it": data}, torch.device("cpu")) == ["it"]


def write_positions(words):
    """Return states of generators, whose position is beyond all words, as NumPy takes them."""
    fields = np.zeros(1, [("key", "<u4", 624), ("pos", "<i8")])[0]
    fields["pos"] = 2 * 10**9
    rest = {"bit_generator": "MT19937", "has_gauss": 0, "gauss": 0.0}
    return [("MT19937", words, 2 * 10**9), {**rest, "state": fields}]


@pytest.mark.parametrize("place", [0, 1])
def test_a_generators_state_in_another_form_is_refused(place):
    """NumPy takes it, and would end the process in the next draw."""
    _, changes = make_program()
    state = write_positions(np.zeros(624, np.uint32))[place]
    for kind in ("legacy", "numpy"):
        plain = Form(("generator", [[kind, "MT19937"], encode_plain(state)]))
        data = encode(["model", ["count"], plain])
        assert changes.restore({"it": data}, torch.device("cpu")) == ["it"]
    host = {"host": pack_bytes(encode_plain([None, state])), "torch": None, "devices": {}}
    with pytest.raises(ValueError, match="The state of a generator is a dict"):
        decode_rng(host | {"own": {}})


def test_an_array_of_another_shape_is_refused_and_its_memory_stays():
    """A tensor may share it."""
    owners, changes = make_program()
    array = owners["model"].array
    shared = torch.from_numpy(array)
    for shape in (1, 2**20):
        data = encode(["model.array", [], np.ones(shape)])
        assert changes.restore({"it": data}, torch.device("cpu")) == ["it"]
    assert (array.shape, shared.data_ptr(), shared.tolist()) == ((2,), array.ctypes.data, [0, 0])


def test_data_of_each_kind_is_written_to_objects_made_alike():
    (owners, here), (others, there) = make_program(), make_program()
    model = owners["model"]
    model.late, model.color, model.seen["b"], model.slotted.size = [1], Color.BLUE, 3, 4
    model.items.reverse()
    vars(model)["table"], model.hook = 5, None
    owners["Kind"].level, owners["program"].size, owners["program"].late = 2, 4, {"x": 1}
    captured, unknown = here.capture()
    assert unknown == []
    assert there.restore(captured, torch.device("cpu")) == []
    other = others["model"]
    assert (other.late, other.color, other.seen, other.slotted.size) == (
        [1], Color.BLUE, {"a": 2, "b": 3}, 4,
    )  # fmt: skip
    assert isinstance(other.items[0], FunctionType)
    assert (other.items[1], other.table, other.hook) == (1, 5, None)
    assert (others["Kind"].level, others["program"].size) == (2, 4)
    assert others["program"].late == {"x": 1}


def test_a_parameter_without_a_shape_has_no_bytes():
    """One that a function of the program names counts by that it is there."""
    assert digest_data(torch.nn.LazyLinear(3).weight) == ()
