"""Long tables that steps change are put back, whenever they change first."""

import threading
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from lightning_d9m.engine.state.plain_data import decode_plain, encode_plain
from lightning_d9m.errors import SettingError
from lightning_d9m.integrations.strategies.sums.sandbox import Sandbox
from lightning_d9m.integrations.strategies.sums.tree import Blocks


class Tokenizer:
    """Stands for an object of a library with a vocabulary."""

    __module__ = "json.tokenizer"

    def __init__(self):
        self.vocabulary = dict.fromkeys(map(str, range(2000)), 0)


def run_step(sandbox, block, change, stage="train"):
    """Call a function for each logical rank of a process."""
    sandbox.begin()
    for rank in block:
        change(rank)
        sandbox.end(rank, last=rank == block[-1])
    sandbox.finish(stage)


@pytest.fixture
def run():
    """Return a function that runs steps of two logical ranks; each calls a function."""
    module, block = nn.Linear(1, 1), range(2)
    module.tokenizer = Tokenizer()
    blocks = SimpleNamespace(logical_ranks=2)
    sandbox = Sandbox(module, SimpleNamespace(block=block, blocks=blocks), lambda *_: False)

    def steps(count, change):
        for _ in range(count):
            run_step(sandbox, block, partial(change, module.tokenizer.vocabulary))
        return module.tokenizer.vocabulary

    return steps


def count(vocabulary, rank):
    assert vocabulary["7"] == vocabulary["8"]  # as at the start of the step
    vocabulary["7"] = vocabulary["8"] = vocabulary["7"] + 1


def test_what_the_first_steps_change_is_compared_in_each_step(run):
    assert run(9, count)["7"] == 9


def test_what_is_added_is_merged_in_each_step(run):
    run(9, lambda *_: None)
    found = run(2, lambda own, rank: own.setdefault(f"new {rank} {len(own)}", rank))
    assert [*found][2000:] == ["new 0 2000", "new 1 2000", "new 0 2002", "new 1 2002"]


def test_what_later_steps_change_first_is_put_back(run):
    run(5, lambda *_: None)
    assert run(9, count)["7"] == 9


def step(change, ranks=2, stage="train", **attributes):
    """Run a step of logical ranks on a module with attributes; return the module."""
    module, blocks = nn.Linear(1, 1), SimpleNamespace(logical_ranks=ranks)
    vars(module).update(attributes)
    block = range(ranks)
    sandbox = Sandbox(module, SimpleNamespace(block=block, blocks=blocks), lambda *_: False)
    run_step(sandbox, block, partial(change, module), stage)
    return module


def train(processes, change, make, ranks=4, steps=3):
    """Run steps of logical ranks on processes, which are threads; return the attributes of each."""
    blocks, rows = Blocks(ranks, processes), [b""] * processes
    barrier = threading.Barrier(processes, timeout=30)

    def run(process):
        def gather(values):
            rows[process] = encode_plain(values)
            barrier.wait()
            found = [decode_plain(row) for row in rows]
            barrier.wait()
            return found

        block, module = blocks.of(process), nn.Linear(2, 1)
        words = {"block": block, "blocks": blocks, "gather_values": gather, "world_size": 1}
        sandbox = Sandbox(module, SimpleNamespace(**words), lambda *_: False)
        vars(module).update(attributes := make())
        for number in range(steps):
            run_step(sandbox, block, lambda rank, n=number: change(module, rank, n))
        return {name: getattr(module, name) for name in attributes}

    with ThreadPoolExecutor(processes) as pool:
        return list(pool.map(run, range(processes)))


def describe(value):
    """Return types and values of all that a container holds."""
    if isinstance(value, dict):
        held = [(key, describe(part)) for key, part in value.items()]
        return type(value).__name__, held, getattr(value, "default_factory", None)
    if isinstance(value, list | deque | tuple):
        return type(value).__name__, [describe(part) for part in value]
    data = isinstance(value, torch.Tensor | np.ndarray)
    return type(value).__name__, value.tolist() if data else value


def fill(module, rank, step):
    """Change containers of all kinds, and what they hold, as logical ranks of a program do."""
    module.rows.append((rank, step))
    module.seen.add(rank * step)
    module.counts["all"] = module.counts["all"] + 1
    module.counts[rank] = step
    module.weights[rank] = module.bank[2 * rank] = rank + step
    module.recent.extend(float(f"{rank % 2}") for _ in range(rank))
    by_class = module.by_name.setdefault(f"class {(rank + step) % 3}", Counter())
    by_class[f"seen {rank}"] += 1
    module.by_name.setdefault("lists", defaultdict(list))[step].append(rank)
    module.by_name.setdefault(f"order {rank}", OrderedDict())["step"] = np.float32(step)
    module.mixed[0] = step
    if rank % 2:
        module.mixed.append(rank)
    module.replaced.append(rank)
    module.replaced = [*module.replaced, step]
    module.table[rank, step] = torch.full((2,), float(rank))
    module.table.pop("old", None)
    if rank == 3:  # and then again, which changes the order of keys
        module.table["first"] = module.table.pop("first")
    if step == 1 and rank == 0:
        module.halved[0] = 0.25
    elif rank == 1:
        module.halved.append(step)


def make_containers():
    recent = deque((float("1") for _ in range(6)), maxlen=6)
    words = {"rows": [], "seen": {7}, "counts": Counter(all=3), "by_name": {}, "mixed": [5]}
    data = {"weights": np.zeros(5, np.uint16), "bank": torch.zeros(9)}
    return (
        words
        | data
        | {
            "recent": recent,
            "replaced": [1],
            "table": {"old": 2, "first": 1, "last": 3},
            "halved": [0.5, 0.75],
        }
    )


def test_containers_of_all_kinds_are_alike_on_any_number_of_processes():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (alone,) = train(1, fill, make_containers)
        for processes in (2, 3, 4):
            for found in train(processes, fill, make_containers):
                for name, value in alone.items():
                    assert describe(found[name]) == describe(value), (processes, name)
    assert alone["rows"] == [(rank, step) for step in range(3) for rank in range(4)]
    appended = [float(rank % 2) for rank in range(4) for _ in range(rank)]
    assert [*alone["recent"]] == appended
    assert alone["by_name"]["lists"] == {step: [0, 1, 2, 3] for step in range(3)}
    assert alone["weights"].tolist() == [2, 3, 4, 5, 0]


def test_a_list_that_is_changed_and_then_replaced_is_put_back():
    def change(module, _):
        assert module.rows == [0]  # as at the start of the step
        module.rows[0] = 5
        module.rows = [7]

    assert step(change, rows=[0]).rows == [7]


def test_data_that_a_program_keeps_on_the_host_stay_there():
    def change(module, rank):
        module.rows.append(torch.zeros(1))
        module.weights[2 * rank] = 5 + rank

    device = torch.device("meta")  # of the module
    found = step(change, device=device, rows=[], weights=np.zeros(3))
    assert [part.device.type for part in found.rows] == ["cpu", "cpu"]
    assert found.weights.tolist() == [5, 0, 6]


@pytest.mark.parametrize("processes", [1, 2])
def test_weights_that_logical_ranks_write_differently_are_refused(processes):
    def change(module, rank, _):
        with torch.no_grad():
            module.weight += rank + 1

    with pytest.raises(SettingError, match="different values to the same elements of 'weight'"):
        train(processes, change, dict, ranks=2)


@pytest.mark.parametrize("length", [4, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int8])
def test_what_logical_ranks_write_to_different_elements_is_kept(dtype, length):
    def change(module, rank):
        module.bank[2 * rank] = 5 + rank
        module.bank[3] = 1

    found = step(change, bank=torch.zeros(length, dtype=dtype))
    assert found.bank[:4].tolist() == [5, 0, 6, 1]


def test_different_values_of_one_element_are_refused():
    with pytest.raises(SettingError, match="different values to the same elements of 'bank'"):
        step(lambda module, rank: module.bank.fill_(rank + 1), bank=torch.zeros(2))
    with pytest.warns(UserWarning, match="the value of logical rank 0 is kept"):
        total = step(lambda module, rank: module.total.add_(rank + 1), total=torch.zeros(1))
    assert total.total == 1


@pytest.mark.parametrize("most", [3, 5, 9])
def test_a_deque_gets_what_all_append(most):
    recent = deque([1, 2, 3], maxlen=most)
    step(lambda module, rank: module.recent.extend([10 * rank, 10 * rank + 1]), recent=recent)
    assert [*recent] == [1, 2, 3, 0, 1, 10, 11][-most:]


def test_a_full_deque_whose_appended_items_may_not_show_is_named():
    def append(module, rank):
        if module.added[rank] is not None:
            module.recent.append(module.added[rank])

    for start, added in (([1] * 3, [0, 1]), ([1], [0, 1])):
        with pytest.warns(UserWarning, match="changes 'recent' .* logical rank 0 is kept"):
            found = step(append, recent=deque(start, len(start)), added=added).recent
        assert [*found] == [*start[1:], 0]
    for start, added, right in (([1] * 3, [0, 2], [1, 0, 2]), ([1, 2], [3, None], [2, 3])):
        found = step(append, recent=deque(start, len(start)), added=added).recent
        assert [*found] == right


def test_what_logical_ranks_write_to_an_array_or_to_different_keys_is_kept():
    def change(module, rank):
        module.weights[2 * rank] = module.by_sample[rank] = 5 + rank
        module.by_sample["seen"] += 1
        if rank:
            del module.by_sample["old"]

    by_sample = {0: 0, 1: 0, "seen": 0, "old": 0}
    found = step(change, weights=np.zeros(3), by_sample=by_sample)
    assert found.weights.tolist() == [5, 0, 6]
    assert found.by_sample == {0: 5, 1: 6, "seen": 1}


def test_what_all_add_under_one_new_key_is_merged():
    def change(module, rank):
        names = module.found.setdefault("names", {"rows": [], "ids": set(), "alike": 3})
        names["rows"].append(rank)
        names["ids"].update({0, rank})
        names[rank] = deque([rank], maxlen=1)
        module.found.setdefault("last", deque(maxlen=2)).extend([rank, rank])

    found = step(change, ranks=3, stage="validate", found={}).found
    last = {0: deque([0]), 1: deque([1]), 2: deque([2])}
    assert found["names"] == {"rows": [0, 1, 2], "ids": {0, 1, 2}, "alike": 3, **last}
    assert [*found["last"]] == [2, 2]


@pytest.mark.parametrize(("kind", "counting"), [(dict, (1, 2, 2)), (Counter, (0, 1, 1))])
def test_numbers_that_count_under_one_new_key_are_refused(kind, counting):
    def change(module, rank):
        module.counts["all"] = 1
        if counting[rank]:
            module.counts["seen"] = counting[rank]

    with pytest.raises(SettingError, match=r"changes 'counts'.* would count only some of them"):
        step(change, ranks=3, stage="validate", counts=kind())
    with pytest.warns(UserWarning, match="changes 'counts' .* logical rank 0 is kept"):
        assert step(change, ranks=3, counts=kind()).counts == {"all": 1, "seen": 1}


@pytest.mark.parametrize("changing", [(1, 2), (0, 1, 3)])
def test_entries_to_which_several_but_not_all_have_added_are_refused(changing):
    def change(module, rank):
        module.counts["seen"] += rank in changing

    with pytest.raises(SettingError, match=r"counts\['seen'\].* would count only some of them"):
        step(change, ranks=4, stage="validate", counts={"seen": 0})


def test_an_entry_that_cannot_be_sent_leaves_the_others():
    def change(module, rank):
        module.by_sample[rank] = object() if rank == 1 else 5 + rank

    with pytest.warns(UserWarning, match=r"by_sample\[1\].* logical rank 0 is kept"):
        found = step(change, ranks=3, by_sample={0: 0, 1: 0, 2: 0}).by_sample
    assert found == {0: 5, 1: 0, 2: 7}


@pytest.mark.parametrize("dtype", ["longdouble", "u2", "u4", "Q"])
def test_arrays_of_types_that_torch_lacks(dtype):
    def change(module, rank):
        module.weights[2 * rank] = 5 + rank
        module.other = module.weights[::-1]

    with pytest.warns(UserWarning, match="'other'.* the value of logical rank 0 is kept"):
        found = step(change, weights=np.zeros(3, dtype), other=np.zeros(3))
    assert found.weights.tolist() == [5, 0, 6]


def test_a_list_too_long_to_be_entered_is_put_back():
    def change(module, rank):
        assert module.counts[7] == module.table["7"] == 0  # as at the start of the step
        module.counts[7] = module.table["7"] = 1
        module.added.append(rank)

    length = 100_001
    words = {"counts": [0] * length, "added": [0] * length}
    found = step(change, table=dict.fromkeys(map(str, range(length)), 0), **words)
    assert (found.counts[7], found.table["7"], found.added[length:]) == (1, 1, [0, 1])


def test_objects_in_it_that_steps_change_are_named():
    rows = [[0] for _ in range(100_001)]
    with pytest.warns(UserWarning, match="'rows'.* depend on the number of processes"):
        step(lambda module, _: module.rows[7].append(1), rows=rows)
