"""Run a training several times and assert that the results are bit-identical."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from lightning_d9m.engine.control.session import deterministic
from lightning_d9m.engine.control.settings import Settings
from lightning_d9m.engine.hashing.digest import digest_value
from lightning_d9m.engine.hashing.nested_values import list_pytree_leaves
from lightning_d9m.engine.hashing.training_state import take_partial_snapshot
from lightning_d9m.engine.ledger.folder import LEDGER_VARIABLE, list_fits, read_ledger
from lightning_d9m.errors import NotBitExactError, SettingError
from lightning_d9m.integrations.loop.optimizer_steps import OptimizerSteps
from lightning_d9m.text import describe_pair
from lightning_d9m.tools.comparison.ledgers import compare_ledgers
from lightning_d9m.tools.launch.runs import pair_fits
from lightning_d9m.tools.output.comparison_text import format_comparison

_PAIR = 2
_CONTAINERS = dict, list, tuple


def assert_bit_exact(
    train_function: Callable[[], object],
    runs: int = 2,
    *,
    settings: Settings | None = None,
    **overrides: Any,
) -> None:
    """Run a function several times, each in a deterministic session, and compare the bits.

    Compares the return values (a module, a Trainer, tensors, numbers, text, and dicts, lists and
    tuples of them) and the ledgers of the fits with a ``DeterminismCallback``, which are written to
    a temporary folder.

    Args:
        train_function: Called without arguments; it builds everything that it trains.
        runs: The number of runs, at least 2.
        settings: Settings of the sessions; the defaults when None.
        overrides: Single settings by name, such as ``seed=42``.

    Raises:
        NotBitExactError: If a run differs from the first, with the first divergence.
        SettingError: If a setting is not allowed, or there is nothing to compare.

    Examples:
        >>> def train():
        ...     torch.manual_seed(1)
        ...     return torch.rand(3)
        >>> assert_bit_exact(train)
    """
    __tracebackhide__ = True  # pytest shows the line of the test
    # Not `isinstance`: `True` is an int, and one run.
    if type(runs) is not int or runs < _PAIR:
        raise SettingError(f"runs is {runs!r}; allowed: a whole number from 2.")
    name = getattr(train_function, "__qualname__", repr(train_function))
    with TemporaryDirectory(prefix="d9m-") as folder:
        outcomes = []
        for number in range(1, runs + 1):
            ledgers = Path(folder, f"run-{number}")
            with as_first_run(ledgers, settings, **overrides):
                digests = _digest_entries(train_function())
            outcomes.append((digests, list_fits(ledgers) if ledgers.exists() else []))
            if not any(outcomes[-1]):
                raise SettingError(
                    f"{name} returned nothing, and no fit in it left a ledger, so there is nothing "
                    "to compare. Return the model or its weights, or train with "
                    "callbacks=[DeterminismCallback()]."
                )
            # After each run and not at the end: the first difference spares the runs that follow.
            problem = _describe_outcome_difference(outcomes[0], outcomes[-1])
            if problem is not None:
                raise NotBitExactError(f"Run {number} of {name} differs from run 1. {problem}")


@contextmanager
def as_first_run(ledgers: Path, settings: Settings | None, **overrides: Any) -> Iterator[None]:
    """Run the body in a new deterministic session, with its ledgers in a folder.

    Args:
        ledgers: Folder for the ledgers of its fits.
        settings: Settings of the session; the defaults when None.
        overrides: Single settings by name.
    """
    # Within the session, because its end restores the variables that it has set.
    before = os.environ.get(LEDGER_VARIABLE)
    with deterministic(settings, **overrides):
        os.environ[LEDGER_VARIABLE] = str(ledgers)
        try:
            with ExitStack() as stack:
                for steps in OptimizerSteps.installed:  # with LIGHTNING_D9M=1
                    stack.enter_context(steps.separated())
                yield
        finally:
            if before is None:
                # The body may have removed it, which must not hide how the body ended.
                os.environ.pop(LEDGER_VARIABLE, None)
            else:
                os.environ[LEDGER_VARIABLE] = before


class FitDifference(NamedTuple):
    """A difference between the ledgers of two runs, and whether their stacks may explain it."""

    text: str
    may_be_stack: bool = False


def compare_fits(expected: list[Path], actual: list[Path]) -> FitDifference | None:
    """Describe how the ledgers of two runs differ; None if they agree."""
    if len(expected) != len(actual):
        counts = f"reference: {len(expected)}\nthis run:  {len(actual)}"
        return FitDifference(f"The numbers of their fits differ.\n{counts}")
    first, second = (
        {f"fit-{number:03d}": read_ledger(path) for number, path in enumerate(paths)}
        for paths in (expected, actual)
    )
    # By content, because processes that fit in parallel number their folders in any order.
    paired = pair_fits(first, second)
    unpaired = iter([ledger for name, ledger in paired.items() if name not in first])
    for name, ledger in first.items():
        counterpart = paired[name] if name in paired else next(unpaired)
        comparison = compare_ledgers(ledger, counterpart)
        if not comparison.equal:
            text = "\n".join(["Their ledgers differ.", *format_comparison(comparison)])
            return FitDifference(text, bool(comparison.stack) and not comparison.portable)
    return None


_Outcome = tuple[dict[str, str], list[Path]]


def _describe_outcome_difference(expected: _Outcome, actual: _Outcome) -> str | None:
    problem = compare_fits(expected[1], actual[1])
    if problem is not None:
        return problem.text
    # In the order of the first run, so that the first entry that differs is the first one returned.
    names = [*expected[0], *(name for name in actual[0] if name not in expected[0])]
    differing = [name for name in names if expected[0].get(name) != actual[0].get(name)]
    if not differing:
        return None
    first = differing[0]
    digests = (found[0].get(first, "no such entry") for found in (expected, actual))
    reference, this_run = describe_pair(*digests)
    return (
        f"{len(differing)} of {len(names)} returned entries differ, the first {first}.\n"
        f"reference: {reference}\nthis run:  {this_run}"
    )


def _digest_entries(result: object) -> dict[str, str]:
    """Return one digest for each entry of a result, by the entry's path."""
    entries: dict[str, str] = {}
    leaves = list_pytree_leaves(result)
    # A container without entries is equal in any two runs.
    empty = (leaf is None or (isinstance(leaf, _CONTAINERS) and not leaf) for _, leaf in leaves)
    if all(empty):
        return entries
    times = Counter[str]()
    for path, entry in leaves:
        where = f"result.{path}" if path else "result"
        times[where] += 1
        if times[where] > 1:  # such as of the keys 1 and "1"
            where += f"'{times[where]}"
        # Without an import of Lightning, which a plain training loop does not need.
        found = getattr(entry, "lightning_module", entry)  # of a Trainer, the module it trained
        if found is None and entry is not None:
            raise SettingError(
                f"{where} is a {type(entry).__name__} that has trained no module, so there is "
                "nothing to compare. Call its fit before you return it."
            )
        if isinstance(found, torch.nn.Module):
            for group in take_partial_snapshot(found).groups.values():
                entries |= {f"{where}.{name}": digest for name, digest in group.items()}
        else:
            entries[where] = digest_value(found)
    return entries
