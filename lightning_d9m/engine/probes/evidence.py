"""The evidence that a run keeps for ``d9m locate``, beside its ledger.

A first run notes the digests of what each operation is given and gives. A second one compares its
own while it runs: at the first operation of a module that gives something else for equal inputs, it
has these inputs, and the process knows every operation that the program has registered, so it runs
the operation alone there. Of other places, both keep the values at the place that is named.

The file is torch's own format without any code.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from inspect import unwrap
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from lightning_d9m.engine.hashing.digest import digest_value
from lightning_d9m.engine.ledger.format.records import ProbeKey
from lightning_d9m.engine.probes.op_values import keep, replay_op, take_generators
from lightning_d9m.engine.probes.training import ProbePoint, StatePoint
from lightning_d9m.errors import LedgerError, file_errors

# An operation that gives a second result in 1 of 7 runs shows it with 95%.
_REPLAYS = 20

Profile = Callable[[str], AbstractContextManager[object]]


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
        first = None if reference is None else reference / folder.name
        self._known = {} if first is None else read_evidence(first, rank)["ops"]
        self._seen: set[tuple[str, str]] = set()
        self._content: dict[str, Any] = {"ops": {}, "found": {}, "values": {}, "hooks": []}

    def takes(self, name: str) -> bool:
        """Return whether the values at a place are kept."""
        return name == self._name or name.startswith(f"{self._name}:")

    def save(
        self, moment: ProbePoint | StatePoint, place: ProbeKey, content: Mapping[str, Any]
    ) -> None:
        """Take what is at a place: ``value``, or what ``copy_inputs`` gives and the outputs."""
        key = (moment.folder, *place)
        if "op" in content:
            self._take_op(key, content)
        if self.takes(place[1]):
            self._content["values"][key] = keep(content.get("value", content.get("outputs")))

    def _take_op(self, key: tuple[str, str, str, int], content: Mapping[str, Any]) -> None:
        """Note the digests of an operation, and examine it if it is the first that differs."""
        generators: list[Any] = [content.get("rng")]
        given = take_generators([content["args"], content["kwargs"]], generators)
        # Filled memory cannot change a number: reading it from a tensor is an operation, which
        # would have differed first.
        tensors = tree_map(lambda x: None if isinstance(x, int | float | complex) else x, given)
        numbers = [x for x in tree_leaves(given) if isinstance(x, int | float)]
        parts = {"given": given, "tensors": tensors, "generators": generators}
        parts["outputs"] = content["outputs"]
        own = {name: digest_value(part) for name, part in parts.items()} | {"numbers": numbers}
        self._content["ops"][key] = own
        known, within = self._known.get(key), (key[0], key[2].partition("::")[0])
        if known is None or known["outputs"] == own["outputs"] or within in self._seen:
            return
        self._seen.add(within)
        found = {name: content.get(name) for name in ("op", "source", "backward")}
        found["flags"] = [own for own in content["args"] if isinstance(own, bool)]
        found |= {"inputs_equal": known["given"] == own["given"], "values": None}
        found["only_numbers_differ"] = not found["inputs_equal"] and (
            known["tensors"] == own["tensors"]
        )
        found["generator_equal"] = known["generators"] == own["generators"]
        if found["only_numbers_differ"]:
            pairs = zip(known["numbers"], numbers, strict=False)
            found["values"] = next(([*pair] for pair in pairs if pair[0] != pair[1]), None)
        found |= self._run_alone(content, known["outputs"]) if found["inputs_equal"] else {}
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
                leaves = keep(outputs if isinstance(outputs, list | tuple) else [outputs])
                seen.setdefault(digest_value(leaves), leaves)
        except Exception as error:  # noqa: BLE001 - an operation may raise anything; it is reported
            return {"replays": 0, "outcomes": 0, "obstacle": f"{type(error).__name__}: {error}"}
        found = {"replays": _REPLAYS, "outcomes": len(seen), "obstacle": ""}
        actual = content["outputs"]
        others = (own for key, own in seen.items() if key != digest_value(actual))
        other = seen.get(expected) or next(others, None)
        pairs = zip(tree_leaves(other), tree_leaves(actual), strict=False)
        differ = ([*pair] for pair in pairs if digest_value(pair[0]) != digest_value(pair[1]))
        return found | {"values": next(differ, None)}

    def traced(self, take: Callable[[], str | None], profile: Profile) -> Profile:
        """Return a profiler's method ``profile`` that also notes the state around each hook.

        Args:
            take: Returns the digest of the state; None where hooks are not traced.
            profile: The method.
        """

        def note(when: str, name: str) -> None:
            if (digest := take()) is not None:
                self._content["hooks"].append([when, name, digest])

        @contextmanager
        def trace(name: str) -> Iterator[object]:
            note("before", name)
            with profile(name) as given:
                yield given
            note("after", name)

        return trace

    def close(self) -> None:
        """Write the file.

        Raises:
            LedgerError: When it cannot be written.
        """
        with file_errors(LedgerError, f"The evidence {self._file} cannot be written"):
            # Not a file of the program, which ``saved_files.py`` digests, or leaves out.
            unwrap(torch.save)(self._content, self._file)


def _path(folder: Path, rank: int) -> Path:
    return folder / f"evidence-{rank}.pt"


def read_evidence(folder: Path, rank: int) -> dict[str, Any]:
    """Return the evidence beside a ledger, empty if there is none, without running code in it."""
    path = _path(folder, rank)
    empty: dict[str, Any] = {"ops": {}, "found": {}, "values": {}, "hooks": []}
    return torch.load(path, weights_only=True) if path.exists() else empty


def find_writer(traces: Sequence[Sequence[tuple[str, str, str]]]) -> str:
    """Return what ran when the state of two runs began to differ; empty if it is not known.

    Args:
        traces: The hooks that the evidence of both runs has.
    """
    last: tuple[str, str] | None = None
    for (when, name, digest), other in zip(*traces, strict=False):
        if [when, name] != [*other[:2]]:
            return ""
        if digest != other[2]:
            return "" if last is None else _describe(*last, when, name)
        last = (when, name)
    return ""


def _describe(last_when: str, last: str, when: str, name: str) -> str:
    """Return what ran between two lines of a trace.

    >>> _describe("before", "[Callback]EMA.on_fit_end", "after", "[Callback]EMA.on_fit_end")
    'while EMA.on_fit_end ran'
    >>> _describe("after", "[Callback]A.setup", "before", "run_training_epoch")
    'between A.setup and run_training_epoch, in no hook: by the training loop or a thread'
    """
    last, name = (text.rpartition("]")[2] for text in (last, name))
    if when == "after":
        return f"while {name} ran"
    if last_when == "before":
        return f"while {last} ran, before {name}"
    return f"between {last} and {name}, in no hook: by the training loop or a thread"
