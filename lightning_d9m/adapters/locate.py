"""``d9m locate``: run a command again and again, and close in on where its runs diverge.

Whole run, then the steps of the epoch that differs, then the modules of the step, then the
operations of the module: each look is a pair of runs, steered by variables, so that nothing is
edited and a whole run is cheap. A divergence that does not come back in a narrower look is
reported as far as it was seen.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_d9m.adapters.command_words import add_command_arguments, command_of
from lightning_d9m.adapters.locate_report import describe, describe_place
from lightning_d9m.adapters.locate_runs import Pair, Runner
from lightning_d9m.adapters.repeat import make_output
from lightning_d9m.errors import SettingError
from lightning_d9m.evidence.causes import (
    OUTSIDE,
    UNINITIALISED,
    Cause,
    find_cause,
    first_divergences,
    name_module,
)
from lightning_d9m.evidence.probe_settings import ROOT

if TYPE_CHECKING:
    from lightning_d9m.adapters.locate_op import OpFinding
    from lightning_d9m.evidence.compare import Divergence

_FIRST = "steps of the epoch"
_STEPS = "rng,weight,buffer,optimizer,batch,loss,local_gradient,gradient,scalar,monitor"
_MODULES = f"{_STEPS},input,output,grad_output"
_OPS = f"{_MODULES},op"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the words of ``d9m locate``."""
    parser.usage = (
        "d9m locate [--without-recipe] [--tries N] [-o DIR] [--timeout SECONDS] [--json]\n"
        "                  -- COMMAND ..."
    )
    parser.add_argument(
        "--without-recipe",
        action="store_true",
        help="seed and record, but switch no algorithm: what would differ without lightning_d9m",
    )
    parser.add_argument(
        "--tries", type=int, default=2, help="pairs of runs for each look (default: 2)"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="new folder for ledgers, logs and dumps"
    )
    add_command_arguments(parser, "a training with Lightning")


def run(arguments: argparse.Namespace) -> int:
    """Locate; return 0 when no runs differ, 1 when something was found."""
    words = command_of(arguments)
    _check(arguments, words)
    steering = _without_recipe() if arguments.without_recipe else {}
    output = make_output(arguments.output)
    runner = Runner(words, output, arguments.timeout, steering, _tell)
    found = Search(runner, arguments.tries).locate()
    if arguments.json:
        print(json.dumps(found.as_json() | {"output": str(output)}, indent=2))
    else:
        print("\n".join(describe(found, recipe=not arguments.without_recipe)))
        print(f"ledgers: {output}")
    return 1 if found.cause is not None else 0


def _without_recipe() -> dict[str, str]:
    steering = {"LIGHTNING_D9M_CONTROL": "off"}
    if "PYTHONHASHSEED" not in os.environ:
        steering["PYTHONHASHSEED"] = "random"  # as the program has it: it is fixed otherwise
    return steering


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _escape(module: str) -> str:
    """Return the pattern that a module's name alone matches."""
    return re.sub(r"([*?[])", r"[\1]", module)


def _check(arguments: argparse.Namespace, words: list[str]) -> None:
    if not words:
        raise SettingError(
            "There is no command to run. Give it after `--`: d9m locate -- python train.py"
        )
    if arguments.tries < 1:
        raise SettingError(f"--tries is {arguments.tries}; allowed: a whole number from 1.")
    if arguments.timeout is not None and not arguments.timeout > 0:
        raise SettingError(f"--timeout is {arguments.timeout:g}; allowed: more than 0 seconds.")


@dataclass
class Found:
    """What a search has found.

    Attributes:
        cause: What kind of cause it is; None when no runs differed.
        divergences: The first place of each rank that diverges first, as narrow as it was seen.
        ranks: Number of ranks.
        pair: The runs in which it was seen.
        looks: What each look showed, in words.
        op: What the dumps of the operation show.
    """

    cause: Cause | None = None
    divergences: "tuple[Divergence, ...]" = ()
    ranks: int = 1
    pair: Pair | None = None
    looks: list[str] = field(default_factory=list)
    op: "OpFinding | None" = None

    def as_json(self) -> dict[str, Any]:
        """Return it for ``--json``."""
        record: dict[str, Any] = {
            "verdict": "equal" if self.cause is None else "different",
            "looks": self.looks,
        }
        if self.cause is None:
            return record
        record |= {"cause": self.cause.kind, "text": self.cause.text, "advice": self.cause.advice}
        record["ranks"] = [entry.rank for entry in self.divergences]
        if self.pair is not None:
            record["fit"] = self.pair.fit
        if self.divergences:
            first = self.divergences[0]
            for name in ("moment", "epoch", "step", "batch", "kind", "name", "call", "count"):
                record[name] = getattr(first, name)
        if self.op is not None:
            magnitude = self.op.magnitude
            record["op"] = vars(self.op) | {
                "magnitude": None if magnitude is None else magnitude.as_record()
            }
        return record


class Search:
    """Closes in on a divergence.

    Args:
        runner: Runs the command in pairs.
        tries: Pairs for each look, until one differs.
    """

    def __init__(self, runner: Runner, tries: int) -> None:
        self._runner = runner
        self._tries = tries
        self._found = Found()
        self._low = 0

    def locate(self) -> Found:
        """Return what was found."""
        pair = self._look("whole run")
        while pair is not None:
            pair = self._look_into_epoch(pair)
        return self._found

    def _look_into_epoch(self, pair: Pair) -> Pair | None:
        """Narrow from an epoch; return a pair that diverged in an earlier one, if one has."""
        if not self._found.divergences or self._found.divergences[0].moment in ("initial", "final"):
            return None
        first = self._found.divergences[0]
        # Each pair diverges at a step of its own; all looks begin where the epoch does, which is
        # the last moment at which the runs are known to agree.
        low, high = pair.steps_of_epoch(first.epoch)
        self._low = low
        for stage, kinds in ((_FIRST, _STEPS), ("modules of the step", _MODULES)):
            steps = f"{low}:{max(high, low + 1)}"
            seen = self._look(stage, probes=kinds, probe_steps=steps)
            if seen is None:
                return None
            if self._found.divergences and self._found.divergences[0].moment == "epoch":
                return seen
            if self._found.cause is None or not self._found.cause.narrows:
                return None
            high = self._found.divergences[0].step + 1
        self._look_at_operations(self._found.divergences[0].step)
        return None

    def _look_at_operations(self, step: int) -> None:
        from lightning_d9m.adapters.locate_op import examine_op

        module = name_module(self._found.divergences[0])
        steps = f"{step}:{step + 1}"
        if module == ROOT:
            # All operations of a step may be gigabytes: they are named first, and few are saved.
            if self._look("operations of the step", probes=_OPS, probe_steps=steps) is None:
                return
            module = name_module(self._found.divergences[0])
        stage = f"operations of {module}"
        pair = self._look(
            stage, dump=True, probes=_OPS, probe_steps=steps, probe_modules=_escape(module)
        )
        if pair is not None and self._found.divergences[0].kind == "op":
            self._found.op = examine_op(self._found.divergences[0], pair.dumps)
            cause, op = self._found.cause, self._found.op
            if cause is not None and cause.kind == "op" and op is not None and not op.inputs_equal:
                self._fill()

    def _fill(self) -> None:
        """See whether runs still differ when new memory is filled."""
        for _ in range(self._tries):
            if self._runner.run_pair("filled memory", filled=True).differs:
                self._found.looks.append("filled memory: the runs differ all the same")
                self._found.cause = OUTSIDE
                return
        self._found.looks.append(f"filled memory: nothing differs in {2 * self._tries} runs")
        self._found.cause = UNINITIALISED

    def _is_caught(self, found: "Sequence[Divergence]", steps: str) -> bool:
        """Whether the probes saw the divergence come: it began at a probe, within the steps.

        Where the first step that is probed begins from other state, the cause lies before it.
        """
        if not found or found[0].moment != "batch":
            return False
        start = int(steps.partition(":")[0])
        before = found[0].step == start > self._low
        return not (before and found[0].kind in ("rng", "weight", "buffer", "optimizer"))

    def _is_earlier(self, found: "Sequence[Divergence]") -> bool:
        """Whether a pair diverged in an epoch before the one that is looked into."""
        known = self._found.divergences[0]
        return bool(found) and found[0].moment == "epoch" and found[0].epoch < known.epoch

    def _look(self, stage: str, *, dump: bool = False, **probes: str) -> Pair | None:
        """Run pairs until one differs, and take it for the finding; None when none does."""
        missed = 0
        for _ in range(self._tries):
            pair = self._runner.run_pair(stage, dump=dump, filled=False, **probes)
            if not pair.differs:
                continue
            found = self._found
            divergences = first_divergences(pair.comparison)
            caught = not probes or self._is_caught(divergences, probes["probe_steps"])
            if not caught and not (stage == _FIRST and self._is_earlier(divergences)):
                missed += 1
                continue
            found.cause, found.divergences = find_cause(pair.comparison), divergences
            found.pair, found.ranks = pair, max(1, len(pair.comparison.ranks))
            found.looks.append(f"{stage}: {describe_place(divergences)}")
            return pair
        runs = 2 * self._tries
        outcome = "nothing differs" if not probes else "the divergence did not come back"
        elsewhere = f", {missed} of {self._tries} pairs differ elsewhere" if missed else ""
        self._found.looks.append(f"{stage}: {outcome} in {runs} runs{elsewhere}")
        return None
