"""The evidence that a run keeps for ``d9m locate``, beside its ledger.

A first run notes the digests of what each operation is given and gives. A second one compares its
own while it runs: at the first operation of a module that gives something else for equal inputs, it
has these inputs, and the process knows every operation that the program has registered, so it runs
the operation alone there. Of other places, both keep the values at the place that is named.

The file is torch's own format without any code.
"""

from collections import Counter
from collections.abc import Mapping
from inspect import unwrap
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from lightning_d9m.engine.hashing.digest import DigestQueue, digest_value
from lightning_d9m.engine.ledger.format.records import ProbeKey
from lightning_d9m.engine.probes.op_values import keep, replay_op, take_generators
from lightning_d9m.engine.probes.training import ProbePoint, StatePoint
from lightning_d9m.errors import LedgerError, file_errors

# An operation that gives a second result in 1 of 7 runs shows it with 95%.
_REPLAYS = 20
_NUMBERS = (int, float, complex)


class Evidence:
    """Takes operations, and the values at one place.

    Args:
        folder: The folder of the ledger.
        rank: The rank.
        name: The name of the place whose values are kept, with those of its leaves.
        reference: The folder of the first run; None in the first run itself.
    """

    def __init__(self, folder: Path, rank: int, name: str, reference: Path | None) -> None:
        self._file = _path(folder, rank)
        self._name = name
        self._known: dict[Any, Any] = {}
        if reference is not None:
            first = reference / folder.name
            if not _path(first, rank).exists():
                raise LedgerError(
                    f"The run to compare with has no evidence {_path(first, rank)}. Give the "
                    "folder of a run that kept it."
                )
            self._known = read_evidence(first, rank)["ops"]
        self._batch = ""
        self._calls: Counter[str] = Counter()
        self._seen: set[str] = set()  # modules in which an operation of the batch differs
        self._content: dict[str, Any] = {"ops": {}, "found": {}, "values": {}}

    def begin(self, point: ProbePoint) -> None:
        """Begin a batch, to which operations belong until the next one begins."""
        self._batch = point.folder
        self._calls.clear()
        self._seen.clear()

    def save(self, moment: ProbePoint | StatePoint, place: ProbeKey, value: object) -> None:
        """Keep the value at a place, if it is the one that is named."""
        key, name = (moment.folder, *place), place[1]
        if name == self._name or name.startswith(f"{self._name}:"):
            self._content["values"][key] = keep(value)

    def take_op(self, name: str, content: Mapping[str, Any]) -> None:
        """Note the digests of an operation, and examine it if it is the first that differs.

        Args:
            name: The module that calls it, and the operation.
            content: What ``copy_inputs`` gives, the outputs, the line, and whether it is backward.
        """
        key = (self._batch, "op", name, self._calls[name])
        self._calls[name] += 1
        generators: list[Any] = [content.get("rng")]
        given = take_generators([content["args"], content["kwargs"]], generators)
        # Apart from tensors, because filled memory cannot change a number: reading it from a tensor
        # is an operation, which would have differed first.
        numbers = [x for x in tree_leaves(given) if isinstance(x, _NUMBERS)]
        tensors = tree_map(lambda x: None if isinstance(x, _NUMBERS) else x, given)
        parts = [tensors, numbers, generators, content["outputs"]]
        called = {name: content[name] for name in ("op", "source", "backward")}
        # Of a tensor without bytes, such as a meta tensor, the type is digested.
        own = called | {"digests": [*map(_digest_leaves, parts)], "numbers": numbers}
        own["writes"] = content["writes"]
        self._content["ops"][key] = own
        # Of each module only the first one: the search takes the first of the module whose values
        # differ first, and each takes twenty runs. Those after it differ because of it.
        known, module = self._known.get(key), name.partition("::")[0]
        if known is None or known["digests"][-1] == own["digests"][-1] or module in self._seen:
            return
        self._seen.add(module)
        pairs = zip(known["digests"], own["digests"], strict=True)
        equal_tensors, equal_numbers, equal_generators, _ = (one == other for one, other in pairs)
        found = called | {
            "flags": [flag for flag in content["args"] if isinstance(flag, bool)],
            "inputs_equal": equal_tensors and equal_numbers,
            "only_numbers_differ": equal_tensors and not equal_numbers,
            "generator_equal": equal_generators,
            "values": None,
        }
        if found["inputs_equal"]:
            found |= self._run_alone(content, known["digests"][-1])
        elif equal_tensors:
            found["values"] = find_pair(known["numbers"], numbers)
        self._content["found"][key] = found

    @staticmethod
    def _run_alone(content: Mapping[str, Any], expected: str) -> dict[str, Any]:
        """Run an operation several times on what it was given; return what this shows.

        The values are those of both runs if it gives what the first run got, else of two outputs.
        """
        seen: dict[str, Any] = {}
        try:
            for _ in range(_REPLAYS):
                outputs = replay_op(content)
                # A copy, because some operations return a part of memory that they use again.
                leaves = keep(outputs if isinstance(outputs, list | tuple) else [outputs])
                seen.setdefault(_digest_leaves(leaves), leaves)
        except Exception as error:  # noqa: BLE001 - an operation may raise anything; it is reported
            return {"replays": 0, "outcomes": 0, "obstacle": f"{type(error).__name__}: {error}"}
        found = {"replays": _REPLAYS, "outcomes": len(seen), "obstacle": ""}
        actual = content["outputs"]
        others = (own for key, own in seen.items() if key != _digest_leaves(actual))
        other = seen.get(expected) or next(others, None)
        return found | {"values": find_pair(other, actual)}

    def close(self) -> None:
        """Write the file.

        Raises:
            LedgerError: When it cannot be written.
        """
        # Opened here: with a path, torch reports errors of the file system as RuntimeErrors.
        with (
            file_errors(LedgerError, f"The evidence {self._file} cannot be written"),
            self._file.open("wb") as file,
        ):
            # Not a file of the program, which ``saved_files.py`` digests, or leaves out.
            unwrap(torch.save)(self._content, file)


def _digest_leaves(value: Any) -> str:
    queue = DigestQueue()
    queue.add_leaves(tree_leaves(value))
    return digest_value(queue.fetch())


def find_pair(one: Any, other: Any) -> list[Any] | None:
    """Return the first leaves of two nested values that differ; None without any."""
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=False)
    differ = ([*pair] for pair in pairs if _digest_leaves(pair[0]) != _digest_leaves(pair[1]))
    return next(differ, None)


def _path(folder: Path, rank: int) -> Path:
    return folder / f"evidence-{rank}.pt"


def read_evidence(folder: Path, rank: int) -> dict[str, Any]:
    """Return the evidence beside a ledger, empty if there is none, without running code in it."""
    path = _path(folder, rank)
    empty: dict[str, Any] = {"ops": {}, "found": {}, "values": {}}
    return torch.load(path, weights_only=True) if path.exists() else empty


def find_writer(one: Mapping[str, Any], other: Mapping[str, Any], batch: str) -> str:
    """Return the first operation that differs in the evidence of two runs, or that one run has.

    It is the one that wrote what differs after it. Empty if that is not known, or if all are equal
    up to a batch, at whose beginning the state was read; without a batch, up to the end.
    """
    # In order, and not by key: a branch that one run alone takes shifts what follows, and it is the
    # difference.
    for ours, theirs in zip_longest(one["ops"].items(), other["ops"].items()):
        key, op = ours or theirs
        if batch == key[0]:
            return ""
        is_pair = ours is not None and theirs is not None and ours[0] == theirs[0]
        if is_pair and ours[1]["digests"] == theirs[1]["digests"]:
            continue
        if is_pair and not op["writes"] and op["digests"][0] != theirs[1]["digests"][0]:
            return ""  # it only reads what something else has written, such as a thread
        alone = "" if is_pair else ", in another order"
        for run, others in ((ours, other["ops"]), (theirs, one["ops"])):
            if run is not None and run[0] not in others:
                op, alone = run[1], ", in one of the runs only"
        called = "in the backward pass of" if op["backward"] else "called at"
        return f"by {op['op']}, {called} {op['source']}{alone}"
    return ""
