"""A state of arbitrary objects is put back to the bit, and its differences are named."""

import copy
import enum
import importlib.util
import random
import sys
import threading
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from object_digest import digest_object
from torch import nn

from lightning_d9m.engine.state.changes import Changes
from lightning_d9m.engine.state.parts import GENERATOR, OPAQUE, TABLE
from lightning_d9m.engine.state.state import Watch, walk


class Color(enum.Enum):
    """Values with names."""

    RED = 1


class Thing:
    """An object of the program."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


class Slotted:
    """An object without a dict."""

    __slots__ = ("own",)

    def __init__(self, own):
        self.own = own


class Named(list):
    """A list with attributes."""

    def __init__(self, items):
        super().__init__(items)
        self.first = items[:1]


@dataclass
class Record:
    """Fields."""

    first: Any
    items: list[Any] = field(default_factory=list)


def make_module(parts):
    """Return a module with a parameter, a buffer, and attributes, private ones too."""
    module = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    module.register_buffer("count", torch.zeros(1))
    module.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    for number, part in enumerate(parts):
        setattr(module, f"_part{number}", part)
    return module


NUMBERS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
NAMES = st.text("abc", min_size=1, max_size=2)
MAKERS = [
    lambda: torch.tensor([1.0, float("nan"), -0.0]),
    lambda: torch.ones(2, 3).t(),
    lambda: torch.ones(1).expand(3),
    lambda: torch.eye(3).to_sparse(),
    lambda: torch.ones((), requires_grad=True),
    lambda: torch.zeros(0, dtype=torch.bfloat16),
    lambda: np.arange(4.0),
    lambda: np.array(["a", None], dtype=object),
    lambda: torch.Generator().manual_seed(3),
    lambda: np.random.default_rng(3),
    lambda: np.random.RandomState(3),
    lambda: random.Random(3),
    lambda: {1, "a"},
    lambda: open,
]
DATA = st.integers(0, len(MAKERS) - 1).map(lambda place: MAKERS[place]())


def hold(parts):
    """Return a strategy of holders of parts."""
    lists = st.lists(parts, max_size=4)
    return (
        lists
        | lists.map(deque)
        | lists.map(lambda found: deque(found, maxlen=4))
        | lists.map(Named)
        | lists.map(tuple)
        | lists.map(make_module)
        | st.dictionaries(NAMES | st.integers(0, 3), parts, max_size=4)
        | st.dictionaries(NAMES, parts, max_size=3).map(lambda found: Thing(**found))
        | st.dictionaries(NAMES, parts, max_size=3).map(OrderedDict)
        | st.dictionaries(NAMES, st.integers(), max_size=3).map(Counter)
        | st.builds(Record, parts, lists)
        | parts.map(Slotted)
    )


GRAPHS = st.recursive(NUMBERS | DATA, hold, max_leaves=12)


def disturb(value, draw):
    """Change one object in place; return whether it can be changed."""
    if isinstance(value, torch.Tensor):
        shape = torch.full((2,), 7.0).to(value.dtype)
        ways = [lambda: setattr(value, "data", shape.to_sparse() if value.is_sparse else shape)]
        if not value.is_sparse and 0 not in value.stride():
            ways = [lambda: value.data.add_(1), lambda: value.detach().mul_(2)]
        draw(ways)()
        return True
    match value:
        case np.ndarray():
            value[0] = 17
        case torch.Generator():
            torch.rand(1, generator=value)
        case np.random.Generator() | random.Random() | np.random.RandomState():
            value.shuffle([1, 2, 3, 4])
        case list() | deque():
            draw([lambda: value.append(5), value.clear, value.reverse])()
        case dict() | set():
            value.update({"new": 1})
        case Slotted() | Thing() | nn.Module() | Record():
            value.own = {"new": 1}
        case _:
            return False
    return True


def watch(owner, **words):
    return Changes({"owner": owner}, leave_out=lambda *_: False, **words)


def carry(owner, other, change):
    """Change an object, and write all of it into one made alike; return the first one's watch."""
    here, there = watch(owner), watch(other)
    change(owner)
    captured, unsaved = here.capture()
    assert (unsaved, there.restore(captured, torch.device("cpu"))) == ([], [])
    return here


@settings(max_examples=100, deadline=None)
@given(graph=GRAPHS, value=NUMBERS, name=NAMES)
def test_a_change_has_exactly_the_disturbed_path(graph, value, name):
    owner = {"graph": graph, "table": {"x": [Thing(**{name: value, "z": 1})]}}
    changes = watch(owner)
    before = changes.capture()
    item, path = owner["table"]["x"][0], "owner['table']['x'][0]"

    def find_changed():
        return set(changes.capture()[0]) - set(before[0])

    assert find_changed() == set()
    setattr(item, name, [value])
    assert find_changed() == {f"{path}.{name}"}
    item.z = 1.0
    del vars(item)[name]
    assert find_changed() == {f"{path}.{name}", f"{path}.z"}


@settings(max_examples=200, deadline=None)
@given(graph=GRAPHS, data=st.data())
def test_what_was_disturbed_is_found_put_back_and_written_into_objects_made_alike(graph, data):
    """As a run that resumes has them; what cannot be written is named."""
    owner = Thing(graph=graph, again=graph)
    owner.itself = owner
    other = copy.deepcopy(owner)
    before, digest = Watch({"owner": owner}), digest_object(owner)
    here, there, copies = watch(owner), watch(other), watch(owner, copies=True)
    at_first, unknown = here.capture()
    assert not unknown
    # Generators are there in any case.
    assert len(at_first) == sum(node.kind is GENERATOR for node in before.nodes.values())
    places = data.draw(st.lists(st.sampled_from([*before.nodes.values()]), min_size=1, max_size=4))
    changed = {
        id(node.owner)
        for node in places
        if disturb(node.owner, lambda ways: data.draw(st.sampled_from(ways)))
    }
    found = before.find_changed()
    assert {id(node.owner) for node in found} <= changed
    assert bool(found) == (digest_object(owner) != digest)
    captured, unknown = here.capture()
    assert bool(captured != at_first or unknown) == bool(found)
    assert there.restore(captured, torch.device("cpu")) == []
    assert unknown or digest_object(owner) == digest_object(other)
    copies.undo(at_first, copies.capture()[0])
    assert unknown or before.find_changed() == []
    for node in before.nodes.values():
        node.kind.write(node.owner, node.content)
    assert before.find_changed() == []
    assert digest_object(owner) == digest
    assert owner.itself is owner
    assert owner.graph is owner.again


@settings(max_examples=150, deadline=None)
@given(graph=GRAPHS, more=GRAPHS, data=st.data())
def test_new_objects_that_several_places_hold_are_one_object_again(graph, more, data):
    owner = Thing(graph=graph, first=None, table={}, items=[])
    other = copy.deepcopy(owner)
    here, there = watch(owner), watch(other)
    nodes = Watch({"graph": graph, "more": more}).nodes.values()
    nodes = [node.owner for node in nodes if node.kind is not TABLE]  # no part of another object
    for _ in range(data.draw(st.integers(1, 4))):
        value = data.draw(st.sampled_from([*nodes, more]))
        match data.draw(st.integers(0, 2)):
            case 0:
                owner.first = (value, owner.first)
            case 1:
                owner.table[f"{len(owner.table)}"] = {"value": value}
            case _:
                owner.items.append(value)
    captured, unknown = here.capture()
    assert there.restore(captured, torch.device("cpu")) == []
    assert unknown or digest_object(owner) == digest_object(other)


@settings(max_examples=25, deadline=None)
@given(graph=GRAPHS, data=st.data())
def test_a_change_of_an_object_in_a_long_list_is_found(graph, data):
    owner = Thing(items=[{"number": number} for number in range(1200)])
    owner.items[700]["graph"] = graph
    changes, digest = watch(owner), digest_object(owner)
    assert changes.capture() == ({}, [])
    nodes = [*Watch({"graph": graph}).nodes.values()]
    if nodes:
        node = data.draw(st.sampled_from(nodes))
        disturb(node.owner, lambda ways: data.draw(st.sampled_from(ways)))
    found, unknown = changes.capture()
    assert {*found, *unknown} <= {"owner.items", "owner.items'"}
    assert found or unknown or digest_object(owner) == digest


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_changed_value_of_a_sparse_tensor_is_a_change(layout):
    owner = Thing(graph=torch.eye(3).to_sparse(layout=layout))
    changes, before = watch(owner), Watch({"": owner})
    assert changes.capture() == ({}, [])
    owner.graph.values().mul_(-1) if layout is torch.sparse_csr else owner.graph.mul_(-1)
    captured, unknown = changes.capture()
    assert captured or unknown == ["owner.graph"]
    assert before.find_changed()


def test_new_objects_are_kept_if_they_are_plain_or_known_and_named_otherwise():
    def make():
        own = Thing(first=Thing(x=1), table={}, items=[Thing(x=2)], none=None)
        return own, Changes({"own": own}, leave_out=lambda *_: False)

    (own, here), (other, there) = make(), make()
    own.noise = np.random.Generator(np.random.MT19937(3))
    own.second, own.table["it"] = own.first, {"deep": (own.items[0], 1.5)}
    own.items += [own.first, torch.ones(2)]
    own.late, own.file, own.none, own.color = Thing(), open, [1], Color.RED
    captured, unknown = here.capture()
    assert unknown == ["own.late", "own.file"]
    assert there.restore(captured, torch.device("cpu")) == []
    assert other.second is other.first is other.items[1]
    assert other.table["it"]["deep"] == (other.items[0], 1.5)
    assert (other.noise.random(), other.none) == (own.noise.random(), [1])
    assert other.color is Color.RED
    here.settle()
    assert here.capture()[1] == []


def test_paths_are_those_of_the_program_and_nothing_is_skipped_silently(tmp_path):
    module = make_module([{"rate": 0.1}])
    with (tmp_path / "file").open("w") as file:
        module.log = file
        found = {path: kind for path, _, kind in walk({"model": module})}
    assert {
        "model._part0['rate']", "model.0.weight", "model.0.in_features",
        "model.1.running_mean", "model.count", "model.frozen", "model.1.momentum",
    } <= found.keys()  # fmt: skip
    assert found["model.log"] is OPAQUE
    parts = walk({"": [Thing()]}, leave_out=lambda _, part: isinstance(part, Thing))
    assert [path for path, _, kind in parts if kind is OPAQUE] == ["[0]"]


def test_what_python_objects_hold_is_entered_but_for_the_code_of_a_class():
    held = [types.MappingProxyType({"x": [1]}), vars(Thing), ValueError({"y": 2})]
    found = [value for _, value, kind in walk({"": held}) if kind is not None]
    assert [1] in found
    assert {"y": 2} in found
    assert not any(isinstance(own, dict) and "__module__" in own for own in found)


@pytest.mark.parametrize(
    ("first", "change"),
    [
        (np.empty((2, 3), object), {"own": np.empty((3, 2), object)}),
        (np.frombuffer(b"ab", "u1"), {"own": np.frombuffer(b"ac", "u1")}),
        (np.empty((2, 3), object), {"shape": (3, 2)}),
    ],
    ids=["another array", "another one that is only read", "another shape"],
)
def test_another_array_or_shape_is_a_change(first, change):
    owner = Thing(own=first)
    changes = watch(owner)
    for name, value in change.items():
        setattr(owner if name == "own" else first, name, value)
    found, unknown = changes.capture()
    assert found or unknown


def test_the_fold_of_a_time_and_the_order_of_a_set_are_kept():
    moment = datetime(2000, 1, 1, fold=1)  # noqa: DTZ001 - as programs have it
    new = [moment, frozenset([8, 0]), Path("a")]
    other = Thing(own=None)
    carry(Thing(own=None), other, lambda owner: setattr(owner, "own", new))
    assert (other.own[0].fold, [*other.own[1]], other.own[2]) == (1, [8, 0], Path("a"))


@pytest.mark.parametrize(("place", "mib"), [("alone", 15), ("in a list", 15), ("at two places", 7)])
def test_tensors_below_the_limit_are_kept(place, mib):
    changed = torch.ones(mib * 2**18)

    def change(owner):
        owner.own = [changed] if place == "in a list" else changed
        owner.twin = owner.own if place == "at two places" else None

    owner, other = (Thing(own=torch.zeros(1), twin=None) for _ in range(2))
    carry(owner, other, change)
    assert digest_object(other) == digest_object(owner)


def test_many_numbers_of_numpy_are_kept():
    owner = Thing(own=None)
    changes = watch(owner)
    owner.own = [np.float64(n) for n in range(150_000)]
    found, unsaved = changes.capture()
    assert (list(found), unsaved) == (["owner.own"], [])


def test_a_large_value_under_a_long_key_is_named():
    owner = Thing(own={})
    changes = Changes({"owner": owner}, leave_out=lambda *_: False, expects=True)
    owner.own[tuple(range(600))] = torch.zeros(5 * 2**20)
    changes.capture()
    assert changes.expected == ["owner.own[tuple 0]"]


def fill_array(number):
    array = np.empty(number, object)
    array[:] = [None] * number
    for place in range(number):
        array[place] = [place]
    return array


def test_what_a_long_array_of_objects_holds_has_no_nodes_and_is_kept():
    owner, other = Thing(own=fill_array(1200)), Thing(own=fill_array(1200))
    here, there = watch(owner), watch(other)
    assert len(here._watch.nodes) < 100
    owner.own[7].append(1)
    found, unsaved = here.capture()
    assert (list(found), unsaved) == (["owner.own'"], [])
    assert there.restore(found, torch.device("cpu")) == []
    assert other.own[7] == [7, 1]


def test_large_objects_in_an_array_are_refused_and_a_cache_in_one_is_filled():
    owner = Thing(own=None, cache=np.empty((2, 2), object))
    changes = watch(owner)
    owner.own = fill_array(1)
    owner.own[0] = torch.zeros(5 * 2**20)
    owner.cache[0, 1] = object()
    assert changes.capture() == ({}, ["owner.own", "owner.cache"])
    assert changes.filled >= {"owner.cache"}


def test_what_a_step_keeps_in_a_parameter_is_kept_or_named():
    layer = nn.Linear(1, 1)
    words = {"leave_out": lambda _, value: value is layer.weight, "expects": True}
    changes = Changes({"layer": layer}, **words)
    layer.weight.scratch, layer.weight.count = torch.zeros(5 * 2**20), 3
    layer.weight.hook = [print]
    layer.kept = torch.zeros(3 * 2**20)
    found, unsaved = changes.capture()
    assert ([*found], unsaved, changes.unknown) == (["layer.kept", "layer.weight.count"], [], [])
    assert changes.expected == ["layer.weight.scratch", "layer.weight.hook"]


def test_a_type_alias_of_a_program_can_be_read():
    """Pickle saves it by a function that only ``copyreg`` knows; no resume is refused for it."""
    changes = watch(Thing(alias=torch.Tensor | list[torch.Tensor]))
    assert (changes.capture(), changes.unknown) == (({}, []), [])


LIBRARY = sys.modules["some_library"] = types.ModuleType("some_library")
LIBRARY.__file__ = "/other/lib/python3/site-packages/some_library.py"


class Weighting(Thing):
    """An object of a library that refers back to the module."""

    __module__ = "some_library"


class Index(Thing):
    """One that says what pickle saves of it: neither its cache nor who uses it."""

    __module__ = "some_library"

    def __reduce__(self):
        return Index, (), {"labels": self.labels}


def make_weighted():
    owner = Thing(rate=1)
    owner.weighting = Weighting(owner=owner, weights={}, every=1)
    return owner


def test_an_object_of_a_library_is_put_back_if_it_holds_only_data_and_what_is_watched():
    new = {"weights": {"a": 0.5}, "every": 2}
    other = make_weighted()
    carry(make_weighted(), other, lambda owner: vars(owner.weighting).update(new))
    assert (other.weighting.weights, other.weighting.every) == ({"a": 0.5}, 2)
    assert other.weighting.owner is other


def add_itself(owner):
    owner.own.append([owner.own, new := [3]])
    new.append(new)


def replace_by(value):
    return lambda owner: setattr(owner, "own", value)


def write_memory(owner):
    np.asarray(owner.own)[3] = 1  # no version counts it


NOT_KEPT = {
    "an object within itself": (list, add_itself),
    "a parameter": (list, lambda owner: owner.own.append(nn.Parameter(torch.ones(1)))),
    "a subclass at two places": (
        list,
        lambda owner: owner.own.extend([type("Own", (OrderedDict,), {})(a=1)] * 2),
    ),
    "functions in an array": (list, replace_by(np.array([print, None]))),
    "a factory of the program": (list, replace_by(defaultdict(lambda: 1))),
    "a part of a long tuple": (
        lambda: tuple([n] for n in range(1200)),
        lambda owner: owner.own[7].append(1),
    ),
    "an object of a library that holds another": (
        lambda: Weighting(count=0, inner=Weighting(count=0)),
        lambda owner: [vars(own).update(count=1) for own in (owner.own, owner.own.inner)],
    ),
    "memory of an array": (lambda: np.zeros(2**22), write_memory),
    "memory of a tensor": (lambda: torch.zeros(2**23), write_memory),
}


@pytest.mark.parametrize(("make", "change"), NOT_KEPT.values(), ids=NOT_KEPT)
def test_a_change_that_cannot_be_kept_is_found_and_named(make, change):
    owner = Thing(own=make())
    changes = watch(owner)
    assert changes.capture() == ({}, [])
    change(owner)
    assert changes.capture() == ({}, ["owner.own"])


def read_unknown(kind, **kept):
    """Return what is unknown of a library's object with a cache of what nothing can read."""
    owner = kind(labels=[1], cache={}, **kept)
    changes = watch(owner)
    owner.cache["engine"] = threading.local()
    owner.labels.append(2)
    assert "owner.labels'" in changes.capture()[0]
    return changes.unknown


class Converted(Index):
    """One that pickles its cache in another form."""

    __module__ = "some_library"

    def __reduce__(self):
        return Index, (), {"labels": self.labels, "cache": [*self.cache]}


def test_what_a_library_leaves_out_where_it_pickles_is_not_unknown():
    assert read_unknown(Index, users=threading.local()) == []
    for kind in (Weighting, Converted):
        assert "owner.cache['engine']" in read_unknown(kind)


def make_stats():
    return Thing(stats=types.SimpleNamespace(mean=0, seen=[1]), other=None, last=None)


def test_a_new_object_in_the_place_of_one_that_is_gone_is_that_one_with_other_values():
    def change(owner):
        for mean in (1, 2):  # in each step
            owner.stats = types.SimpleNamespace(mean=mean, seen=[*owner.stats.seen, mean])
            owner.last = {"it": owner.stats}

    other = make_stats()
    first = other.stats
    carry(make_stats(), other, change)
    assert other.stats is first is other.last["it"]
    assert vars(other.stats) == {"mean": 2, "seen": [1, 1, 2]}


@pytest.mark.parametrize("place", ["other", "last"])
def test_a_new_object_in_the_place_of_one_that_something_holds_is_refused(place):
    owner = make_stats()
    changes = watch(owner)
    held = types.MethodType(Thing.__init__, owner.stats) if place == "other" else [owner.stats]
    setattr(owner, place, held)
    owner.stats = types.SimpleNamespace(mean=1, seen=[])
    _, unsaved = changes.capture()
    assert "owner.stats" in unsaved


def test_values_by_weak_keys_are_put_back():
    def make():
        owner = Thing(first=Thing(), second=Thing())
        owner.counts = weakref.WeakKeyDictionary({owner.first: 1})
        return owner

    owner, other = make(), make()
    here = carry(owner, other, lambda own: own.counts.update({own.first: 2, own.second: 3}))
    assert [*other.counts.items()] == [(other.first, 2), (other.second, 3)]
    assert all(own.__callback__ for own in other.counts.data)  # which drop the entry
    late = Thing()
    owner.counts[late] = 3
    assert here.capture()[1] == ["owner.counts.data[ReferenceType 2]"]


def count_layers():
    found = copy.deepcopy(nn.Linear(1, 1).state_dict())
    assert found._metadata
    return found


@pytest.mark.parametrize(
    "make",
    [
        lambda: defaultdict(list, {"a": [1], 2: [torch.ones(1)]}),
        lambda: defaultdict(None, a=1),
        lambda: Counter("abca"),
        lambda: OrderedDict(b=OrderedDict(c=1), a=defaultdict(int)),
        count_layers,
    ],
    ids=["defaultdict", "without a factory", "Counter", "OrderedDict", "with attributes"],
)
def test_a_new_dict_of_a_builtin_subclass_is_put_back(make):
    other, made = Thing(own=None), make()
    carry(Thing(own=None), other, lambda owner: vars(owner).update(own=[made], again=made))
    (found,) = other.own
    assert (type(found), digest_object(found)) == (type(made), digest_object(made))
    assert [*found] == [*made]
    assert found is other.again
    assert getattr(found, "default_factory", None) is getattr(made, "default_factory", None)
    assert getattr(found, "_metadata", None) == getattr(made, "_metadata", None)


def test_a_module_that_python_imports_when_it_is_used_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "absent_backend.py").write_text("import not_installed")
    monkeypatch.syspath_prepend(tmp_path)
    spec = importlib.util.find_spec("absent_backend")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    program = types.ModuleType("program_with_a_backend")
    program.backend, program.count = importlib.util.module_from_spec(spec), 1
    program.__file__ = __file__
    spec.loader.exec_module(program.backend)
    program.helper = types.ModuleType("helper_of_a_program")  # as `import` makes it
    program.helper.__file__, program.helper.count = __file__, 1
    for module in (program, program.helper):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    changes = Changes({"program": program}, leave_out=lambda *_: False)
    program.count = program.helper.count = 2
    assert [*changes.capture()[0]] == ["program.count", "helper_of_a_program.count"]
    with pytest.raises(ModuleNotFoundError, match="not_installed"):
        _ = program.backend.name
