"""``d9m locate``: run a command again and again, and close in on where its runs diverge.

Whole run, then the steps of the epoch that differs, then the modules of the step, then the
operations of the module: each look is a pair of runs, steered by variables, so that nothing is
edited and a whole run is cheap. A divergence that does not come back in a narrower look is
reported as far as it was seen.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_d9m.cli.arguments import add_command_arguments, command_of
from lightning_d9m.cli.repeat import make_output
from lightning_d9m.comparison.causes import (
    OUTSIDE,
    STATE,
    UNINITIALISED,
    Cause,
    find_cause,
    first_divergences,
    kind_of_place,
    name_module,
)
from lightning_d9m.errors import SettingError
from lightning_d9m.launch.run_pair import Pair, Runner, escape_name
from lightning_d9m.output.locate_text import describe, describe_place
from lightning_d9m.probes.settings import ROOT

if TYPE_CHECKING:
    from lightning_d9m.comparison.ledgers import Divergence
    from lightning_d9m.comparison.magnitude import Magnitude
    from lightning_d9m.locate.op_evidence import OpFinding

_FIRST = "steps of the epoch"
_OPERATIONS = "operations of "
_VALUES = "values"
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
        magnitude: How far the values are apart at the first place, where it is no operation.
    """

    cause: Cause | None = None
    divergences: "tuple[Divergence, ...]" = ()
    ranks: int = 1
    pair: Pair | None = None
    looks: list[str] = field(default_factory=list)
    op: "OpFinding | None" = None
    magnitude: "Magnitude | None" = None

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
            patch = None if self.op.patch is None else self.op.patch.name
            magnitude = _recorded(self.op.magnitude)
            record["op"] = vars(self.op) | {"magnitude": magnitude, "patch": patch}
        elif self.magnitude is not None:
            record["magnitude"] = _recorded(self.magnitude)
        return record


def _recorded(magnitude: "Magnitude | None") -> Mapping[str, object] | None:
    return None if magnitude is None else magnitude.as_record()


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
        self._probes: dict[str, str] = {}

    def locate(self) -> Found:
        """Return what was found."""
        pair = self._look("whole run")
        while pair is not None:
            pair = self._look_into_epoch(pair)
        self._look_at_values()
        return self._found

    def _look_into_epoch(self, pair: Pair) -> Pair | None:
        """Narrow from an epoch; return a pair that diverged in an earlier one, if one has."""
        known = self._found.cause
        if known is None or not known.narrows:
            return None
        first = self._found.divergences[0]
        # Each pair diverges at a step of its own; all looks begin where the epoch does, which is
        # the last moment at which the runs are known to agree.
        low, high = pair.steps_of_epoch(first.epoch)
        self._low = low
        for stage, kinds in ((_FIRST, _STEPS), ("modules of the step", _MODULES)):
            seen = self._look(stage, probes=kinds, probe_steps=f"{low}:{max(high, low + 1)}")
            if seen is None:
                return None
            if self._found.divergences[0].epoch < first.epoch:
                return seen
            if self._found.cause is None or not self._found.cause.narrows:
                return None
            high = self._found.divergences[0].step + 1
        self._look_at_operations(self._found.divergences[0])
        return None

    def _look_at_operations(self, first: "Divergence") -> None:
        """Look at the operations of a module, and at what goes into it and flows back into it.

        Those of other modules are left out: of what a program computes besides, for its own use,
        more may differ than the cause.
        """
        module = name_module(first)
        own = escape_name(module)
        words = {} if module == ROOT else {"probe_modules": f"{own},{own}.*"}
        steps = f"{first.step}:{first.step + 1}"
        self._look(f"{_OPERATIONS}{module}", probes=_OPS, probe_steps=steps, **words)

    def _look_at_values(self) -> None:
        """Save the values of the first place that differs, and say how far they are apart."""
        from lightning_d9m.locate.op_evidence import (
            examine_op,
            measure_recorded,
            measure_saved,
            split_leaf,
        )

        found = self._found
        if not found.divergences or found.pair is None or found.pair.comparison.stack:
            return
        first, initial = found.divergences[0], found.divergences[0].moment == "initial"
        found.magnitude = measure_recorded(first)
        kind = kind_of_place(first)
        if found.magnitude is not None or kind is None or not (self._probes or initial):
            return
        self._low = first.step if initial else self._low
        # With the step before, if it is state: that was equal there, or the cause lies elsewhere.
        start = max(self._low, first.step - 1) if kind in STATE else first.step
        steps = f"{start}:{first.step + 1}"
        words = {"probes": _STEPS} | self._probes | {"probe_steps": steps}
        name = split_leaf(first.name)[0] if kind == "op" else first.name
        pair = self._look(_VALUES, dump=name, **words)
        at = None if pair is None else _find_again(first, first_divergences(pair.comparison)[0])
        if pair is None or at is None:
            return
        if kind != "op":
            found.magnitude = measure_saved(at, kind, pair.dumps)
            return
        found.op = examine_op(at, pair.dumps)
        is_given_other = found.op is not None and not found.op.inputs_equal
        if is_given_other and found.cause is not None and found.cause.kind == "op":
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

    def _is_caught(self, stage: str, found: "Sequence[Divergence]", steps: str) -> bool:
        """Whether a look saw the divergence that is known come, or one of an earlier epoch.

        It is to begin at a probe, within the steps: where the first step that is probed begins from
        other state, the cause lies before it. At the end of an epoch all of whose steps are probed
        it began after them.
        """
        known = self._found.divergences
        if not known or not found:
            return not known
        first = found[0]
        if stage == _VALUES and _find_again(known[0], first) is None:
            return False
        if stage.startswith(_OPERATIONS) and not _is_within(first, stage):
            return False  # it came into the module from outside, where nobody looks
        if first.moment == "epoch":
            return stage == _VALUES or (stage == _FIRST and first.epoch <= known[0].epoch)
        if first.moment != "batch":
            return stage == _VALUES
        start = int(steps.partition(":")[0])
        return not (first.step == start > self._low and first.kind in STATE)

    def _look(self, stage: str, *, dump: str = "", **probes: str) -> Pair | None:
        """Run pairs until one differs, and take it for the finding; None when none does."""
        missed = 0
        for _ in range(self._tries):
            pair = self._runner.run_pair(stage, dump=dump, filled=False, **probes)
            if not pair.differs:
                continue
            found = self._found
            divergences = first_divergences(pair.comparison)
            steps = probes.get("probe_steps", "")
            same_fit = found.pair is None or pair.fit == found.pair.fit
            if not same_fit or not self._is_caught(stage, divergences, steps):
                missed += 1
                continue
            if stage == _VALUES:
                again = _find_again(found.divergences[0], divergences[0])
                found.looks.append(f"{stage}: {describe_place([again] if again else [])}")
                return pair
            seen = bool(found.divergences) and divergences[0].epoch == found.divergences[0].epoch
            found.cause = find_cause(pair.comparison, batches_seen=seen)
            found.divergences = divergences
            found.pair, found.ranks = pair, max(1, len(pair.comparison.ranks))
            found.looks.append(f"{stage}: {describe_place(divergences)}")
            self._probes = probes
            return pair
        runs = 2 * self._tries
        outcome = "nothing differs" if not probes else "the divergence did not come back"
        elsewhere = f", {missed} of {self._tries} pairs differ elsewhere" if missed else ""
        self._found.looks.append(f"{stage}: {outcome} in {runs} runs{elsewhere}")
        return None


def _is_within(found: "Divergence", stage: str) -> bool:
    """Whether something differs by what the module does whose operations are looked at."""
    module = stage.removeprefix(_OPERATIONS)
    return module == ROOT or f"{name_module(found)}.".startswith(f"{module}.")


def _find_again(known: "Divergence", first: "Divergence") -> "Divergence | None":
    """Return a place that is known, as another pair shows it: among the first kind that differs.

    Of a race the first place of that kind is another one in each pair.
    """
    if (first.moment, first.kind) != (known.moment, known.kind):
        return None
    others = [(at.name, at.call) for at in first.places if at.kind == first.kind]
    if (known.name, known.call) not in ((first.name, first.call), *others):
        return None
    return replace(first, name=known.name, call=known.call)
