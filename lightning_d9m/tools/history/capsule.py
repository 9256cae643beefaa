"""Capsules: one step of a training, in a file from which it runs again without program and data.

An archive holds ``capsule.json``, the operations of the step with the values that they need
(``step.pt``), and the files of the program that call them, to be read. No code in it is run: the
operations are those of torch, by their names.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, ZipFile

import msgspec
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_d9m.engine.control.session import deterministic
from lightning_d9m.engine.control.settings import Settings
from lightning_d9m.engine.hashing.digest import digest, digest_value
from lightning_d9m.engine.ledger.folder import Ledger
from lightning_d9m.engine.ledger.format.records import Batch
from lightning_d9m.engine.ledger.stack import capture_stack, stack_differences
from lightning_d9m.engine.probes.module_hooks import UNDEFINED
from lightning_d9m.engine.probes.op_values import is_tagged, keep, run_op
from lightning_d9m.engine.probes.step_tape import (
    flatten,
    is_reference,
    list_keys,
    look_up,
    refer,
)
from lightning_d9m.engine.recording.interruption import STEP_FILE, TAPE
from lightning_d9m.errors import (
    CommandError,
    D9mError,
    LedgerError,
    SettingError,
    file_errors,
    written_whole,
)
from lightning_d9m.text import escape, pluralize
from lightning_d9m.tools.history.bundle import SecretFilter
from lightning_d9m.tools.segments.goto import find_segment
from lightning_d9m.tools.segments.segment import RecordedRun, Segment

STATE = "weight,buffer,optimizer,gradient"
"""The kinds of probes that tell state from data."""

CAPSULE_FACTS = "capsule.json"
_DATA = "data"
_NEEDED = ("op", "args", "kwargs", "rng", "rng_device", "requires_grad")


class CapsuleFacts(msgspec.Struct, frozen=True):
    """The global step, the header of the run's ledger, and how many secrets were removed.

    ``last`` is the last step that its batch makes. ``sizes`` has the bytes of the values, by what
    they are, and of the program's files; ``left_out`` is the size of the data that it does not
    hold; ``differs`` says how the step that was recorded differs from that of the run, and is empty
    if it does not.
    """

    step: int
    last: int
    header: dict[str, Any]
    sizes: dict[str, int]
    left_out: int
    secrets: int
    differs: str


@dataclass
class StepOutcome:
    """The result of a step that ran again: how many operations it has, ran, and has different.

    ``first`` describes the first of those; ``obstacle`` is why an operation that has all its values
    could not run; ``stack`` names what differs from the stack of the run.
    """

    ops: int
    ran: int = 0
    different: int = 0
    first: str = ""
    obstacle: str = ""
    stack: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """``"equal"``, ``"different"``, or ``"incomplete"`` if an operation did not run."""
        whole = 0 < self.ran == self.ops and not self.obstacle
        return "different" if self.different else "equal" if whole else "incomplete"


def find_step(recorded: RecordedRun, step: int) -> Segment:
    """Return the segment that ends with a step, whose operations are recorded.

    Raises:
        SettingError: If the run has no such step, or several processes.
    """
    if (size := recorded.ledger.header.world_size) > 1:
        raise SettingError(
            f"A capsule holds a step of one process, and the run has {size}. Train on one, or "
            "record the step of each with d9m goto --trace."
        )
    return replace(find_segment(recorded, step), kind=TAPE)


def write_capsule(
    path: Path, step: int, ledger: Ledger, content: Path, *, with_data: bool, differs: str
) -> None:
    """Write the archive; values that are neither state nor generators only ``with_data``.

    Args:
        path: The archive.
        step: The global step.
        ledger: The ledger of the run that has recorded the step, with probes of its state.
        content: What the step has left, see ``StepTape``.
        with_data: Whether to put in all values.
        differs: How the ledger differs from the run; empty if it does not.

    Raises:
        CommandError: If the step has left nothing.
        LedgerError: If the archive cannot be written.
    """
    if not content.exists():
        raise CommandError(
            f"Step {step} was not recorded, so no capsule of it was written: an exception ended it."
        )
    found = torch.load(content, weights_only=True)
    kinds, sizes, values = _sort_values(ledger, found), Counter[str](), found["values"]
    for key, own in values.items():
        sizes[kinds[key]] += own.nbytes
    left_out = 0 if with_data else sizes.pop(_DATA, 0)
    found["values"] = {k: own for k, own in values.items() if with_data or kinds[k] != _DATA}
    secrets = SecretFilter()
    sources = dict(_read_sources(found["ops"], secrets))
    sizes |= {name: len(text) for name, text in sources.items()}
    header = secrets.clean_values(ledger.header.as_record())
    for entry in found["ops"]:
        entry["source"] = entry["source"] and secrets.clean_code(entry["source"])
    facts = CapsuleFacts(step, found["last"], header, dict(sizes), left_out, secrets.count, differs)
    sources[CAPSULE_FACTS] = msgspec.json.format(msgspec.json.encode(facts), indent=1)
    with (
        file_errors(LedgerError, f"No capsule is written to {path}"),
        written_whole(path) as part,
        # Not compressed: what torch writes is a ZIP archive itself, in which `torch.load` seeks,
        # and a step back in a compressed member decompresses it from its start again.
        ZipFile(part, "x", ZIP_STORED, strict_timestamps=False) as archive,
    ):
        for name, text in sources.items():
            archive.writestr(name, text)
        # The size is not known before torch has written it; without this, zipfile raises an error
        # at 2 GiB.
        with archive.open(STEP_FILE, "w", force_zip64=True) as member:
            torch.save(found, member)


def _sort_values(ledger: Ledger, content: Mapping[str, Any]) -> dict[str, str]:
    """Return what each value is, by key: what has the digest of a probe is state."""
    batches = (own for own in ledger.records(0) if isinstance(own, Batch))
    known = {own.hex() for batch in batches for own in batch.list_digests()}
    kinds = dict.fromkeys(content["values"], _DATA)
    for entry in content["ops"]:
        # The state of a generator is not in the arguments, and needed by every operation that
        # draws, so it is never left out with the data.
        kinds |= dict.fromkeys(list_keys(entry.get("rng")), "generators")
        for leaf in tree_leaves([entry["args"], entry["kwargs"]], is_leaf=is_tagged):
            if is_reference(leaf) and kinds.get(leaf["key"]) == _DATA:
                # A transposed weight is given as the weight before.
                is_state = digest(look_up(leaf, content["values"], "cpu")) in known
                kinds[leaf["key"]] = "state" if is_state else _DATA
    return kinds


def _read_sources(
    ops: Sequence[Mapping[str, Any]], secrets: SecretFilter
) -> Iterator[tuple[str, bytes]]:
    """Yield the names and texts of the files whose lines call the operations."""
    found = (re.match(r"(.+?\.py):\d+", str(entry["source"])) for entry in ops)
    files = map(Path, dict.fromkeys(own[1] for own in found if own is not None))
    for number, file in enumerate(file for file in files if file.is_file()):
        # It is there to be read, so a file in another encoding is better with marks than left out.
        text = file.read_text(encoding="utf-8", errors="replace").split("\n")
        # Numbered, because two files of a program may have one name in different folders.
        yield f"source/{number}-{file.name}", "\n".join(map(secrets.clean_code, text)).encode()


def open_capsule(path: Path) -> tuple[CapsuleFacts, StepOutcome]:
    """Run the step of an archive.

    No code of it runs, and nothing is unpickled, but operations of torch do not check each of their
    arguments, so an archive that was made for it can write to memory outside of its tensors.

    Raises:
        LedgerError: If it is damaged, or another file.
    """
    try:
        with ZipFile(path) as archive, archive.open(STEP_FILE) as member:
            facts = msgspec.json.decode(archive.read(CAPSULE_FACTS), type=CapsuleFacts)
            return facts, run_step(facts, torch.load(member, weights_only=True))
    # It has said already what is wrong, such as a setting that this machine does not allow.
    except D9mError:
        raise
    except Exception as error:
        raise LedgerError(
            f"{path} is not a capsule, or is damaged: {escape(str(error), 400)}. Give a file that "
            "d9m bundle --step wrote. Other bundles are opened by unzip and d9m compare or report."
        ) from error


def run_step(facts: CapsuleFacts, content: Mapping[str, Any]) -> StepOutcome:
    """Run the operations of a step, and compare what they leave with the run.

    Each has the values that the run gave it, if they are there, so that one that differs does not
    let later ones differ.
    """
    settings, stack = facts.header["settings"], facts.header["stack"]
    words = {name: own for name, own in settings.items() if name in Settings.__dataclass_fields__}
    words |= {name: tuple(own.split()) for name, own in words.items() if isinstance(own, str)}
    # Sums depend on the number of threads.
    words |= {"seed": facts.header["seed"], "threads": stack["threads.intraop"]}
    values, outcome = dict(content["values"]), StepOutcome(len(content["ops"]))
    if skipped := content["skipped"]:
        outcome.obstacle = f"{pluralize(len(skipped), 'call')} ran outside of them: {skipped[0]}."
    with deterministic(**words):
        here = capture_stack()
        there = {name: own for name, own in stack.items() if name in here}
        outcome.stack = tuple(name for name, *_ in stack_differences(there, here))
        # A value is dropped after its last use: a step leaves more than the memory may hold.
        used = [{*list_keys(_select_needed(entry))} for entry in content["ops"]]
        last = {key: number for number, keys in enumerate(used, start=1) for key in keys}
        for number, entry in enumerate(content["ops"], start=1):
            left = _run_op(entry, values, outcome)
            for key in used[number - 1]:
                if last[key] == number:
                    values.pop(key, None)
            if left is None:
                continue
            outcome.ran += 1
            # These leave what the memory held before, which differs in each run.
            is_undefined = entry["op"].partition(".")[2].startswith(UNDEFINED)
            if not is_undefined and digest_value(refer(left)) != entry["digest"]:
                outcome.different += 1
                role = "backward of " if entry["backward"] else ""
                where = f", {role}{entry['source']}" if entry["source"] else ""
                outcome.first = outcome.first or f"operation {number}, {entry['op']}{where}"
            leaves = (tree_leaves(tree, is_leaf=is_tagged) for tree in (entry["left"], left))
            for reference, tensor in zip(*leaves, strict=False):
                is_value = is_reference(reference) and isinstance(tensor, Tensor)
                if is_value and last.get(reference["key"], 0) > number:
                    # A value that differs from that of the run is passed on, too, under the key of
                    # the run's value: nothing else is there. One that the archive has is not
                    # replaced.
                    values.setdefault(reference["key"], flatten(tensor))
    return outcome


def _select_needed(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: entry[name] for name in _NEEDED if name in entry}


def _run_op(entry: Mapping[str, Any], values: Mapping[str, Tensor], outcome: StepOutcome) -> Any:
    """Run an operation; return what it leaves, or None if it lacks a value or cannot run."""
    given = _select_needed(entry)
    if not values.keys() >= {*list_keys(given)}:
        return None
    try:
        _check_op(str(entry["op"]))
        with torch.sparse.check_sparse_tensor_invariants():
            _, *left = run_op(look_up(given, values))
        for own in tree_leaves(left):
            if isinstance(own, Tensor) and own.layout is torch.sparse_coo:
                # Indices outside of the tensor, where an operation on it would write, raise here:
                # backward passes make sparse gradients by an operation that does not check that.
                torch._validate_sparse_coo_tensor_args(own._indices(), own._values(), own.shape)  # noqa: SLF001 - as torch.load does
    except Exception as error:  # noqa: BLE001 - an operation may raise anything; it is reported
        outcome.obstacle = outcome.obstacle or f"{entry['op']}: {error}"
        return None
    return keep(left)


def _check_op(name: str) -> None:
    """Raise unless a name is that of an operation on tensors: TorchScript's can write files."""
    space, _, rest = name.partition(".")
    full = f"aten::{rest.removesuffix('.default')}"
    # TorchScript has `aten::save(t item, str filename)`, which is not in the dispatcher, and
    # `torch.ops` finds both kinds. `from_file` is in it, and maps any file of the machine.
    known = torch._C._dispatch_has_kernel(full)  # noqa: SLF001 - the only way to it
    if space != "aten" or not known or rest.startswith("from_file"):
        raise LedgerError(f"A capsule runs operations of torch on tensors, and {name} is not one.")
