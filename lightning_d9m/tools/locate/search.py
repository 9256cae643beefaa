"""Runs of one command, the search for their first divergence, and its result.

Environment variables control the runs: where they begin and end, what is probed, and which values
are saved. Lines of the program that the rules of ``d9m scan`` report may explain what is found.
"""

import ast
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_d9m.engine.ledger.differences import Divergence, name_value
from lightning_d9m.engine.ledger.folder import Ledger
from lightning_d9m.engine.ledger.format.records import Digests
from lightning_d9m.engine.ledger.kinds import EXCEPTION, ROOT, STATE, WRITTEN, describe_batch
from lightning_d9m.engine.ledger.stack import SHARDED_PARAMETERS
from lightning_d9m.engine.probes.outside import VARIABLE as WATCH
from lightning_d9m.engine.recording.interruption_points import FOLDER, INTERRUPT, KEEP
from lightning_d9m.errors import CommandError
from lightning_d9m.text import escape, pluralize
from lightning_d9m.tools.comparison.causes import (
    OUTSIDE,
    UNINITIALIZED,
    Cause,
    earliest_divergences,
    find_cause,
    find_rank_cause,
    kind_of_place,
    name_module,
)
from lightning_d9m.tools.comparison.ledgers import (
    Comparison,
    compare_ledgers,
    find_rank_drift,
    reference_rank,
)
from lightning_d9m.tools.launch.left_files import FileWatch
from lightning_d9m.tools.launch.run import Run, Runs
from lightning_d9m.tools.lint.rules import Finding
from lightning_d9m.tools.lint.scanner import scan_file
from lightning_d9m.tools.lint.source import SourceError, list_imports, read_python
from lightning_d9m.tools.locate.outside import (
    UNLIKELY,
    OutsideRead,
    describe_samples,
    find_reads,
    list_generators,
)
from lightning_d9m.tools.segments.pair import PairWatch
from lightning_d9m.tools.segments.segment import RecordedRun, Segment, is_drift, run_segment

if TYPE_CHECKING:
    from lightning_d9m.tools.comparison.numeric_difference import Magnitude
    from lightning_d9m.tools.locate.op_evidence import OpFinding

_MOST_FILES = 500
# The whole run, the modules, the operations, the values, filled memory.
_MOST_LOOKS = 5
# Of draws, then of orders, which may also decide values: of labels that a set numbers, say.
_ANY = tuple(f"D9M{number}" for number in (201, 203, 204, 206, 207, 301, 302, 303, 305, 306))
# By the kind of the cause.
_RULES = {
    **dict.fromkeys(("data", "initial weights", "inputs", "value from outside torch"), _ANY),
    "random numbers": ("D9M204",),
}

_DUMP = "LIGHTNING_D9M_DUMP"
_DUMP_NAMES = "LIGHTNING_D9M_DUMP_NAMES"
# torch fills new memory only while deterministic algorithms are on.
_FILLED = {"LIGHTNING_D9M_CONTROL": "on", "LIGHTNING_D9M_FILL_UNINITIALIZED_MEMORY": "1"}


@dataclass(frozen=True)
class RunPair:
    """Two runs and how they compare.

    Attributes:
        fit: Name of the first fit that differs; of the last one if none does.
        comparison: How that fit compares.
        expected: Its ledger in the first run.
        fits: Number of fits in each run.
        equal_fits: Number of those before it, which are equal.
        dumps: The folders of dumps of the two runs.
        actual: Its ledger in the second run.
        rank_drift: Where a rank differs from another, in two runs that are equal.
    """

    fit: str
    comparison: Comparison
    expected: Ledger
    fits: int = 1
    equal_fits: int = 0
    dumps: tuple[Path, ...] = ()
    actual: Ledger | None = None
    rank_drift: Divergence | None = None

    @property
    def differs(self) -> bool:
        """Whether the two runs differ."""
        return not self.comparison.equal

    def steps_of_epoch(self, epoch: int) -> tuple[int, int]:
        """Return the global steps of an epoch, as the first one and the one after the last."""
        ends = {-1: 0}
        for record in self.expected.line_records(min(self.expected.files)):
            if isinstance(record, Digests) and record.moment == "epoch":
                ends[record.epoch] = record.step
        return ends.get(epoch - 1, 0), ends.get(epoch, 2**31)


class Runner:
    """Runs the command, each time in a new folder.

    The first two runs train side by side and end at their first difference; they keep checkpoints,
    from which later looks begin.

    Args:
        runs: The runs of the command.
        variables: Environment variables of every run.
        beside: Whether the first two take turns; else the second follows the first.

    Attributes:
        command: The command.
        files: What the runs write and read.
    """

    def __init__(self, runs: Runs, variables: Mapping[str, str], *, beside: bool = True) -> None:
        self.command = runs.command
        self.files = FileWatch(runs.command, runs.output)
        self._runs = runs
        self._variables = variables
        self._beside = beside
        self._numbers = count(1)
        self._looks = 0
        self._seconds = 0.0  # that the first look took

    def run(
        self,
        stage: str,
        *,
        segment: Segment | None = None,
        dump: str = "",
        filled: bool = False,
        later: int = 0,
        watched: Path | None = None,
        **probes: str,
    ) -> tuple[Run, Path]:
        """Run once; return the run and the folder of its dumps, which need not exist.

        Args:
            stage: Name of the look, for the progress line.
            segment: The part of the run; None for all of it.
            dump: Name of the place whose values are saved; empty for none.
            filled: Whether to switch on everything that fills new memory.
            later: The number of runs of the look that follow.
            watched: The folder of a run that has ended; this one ends where it first differs.
            **probes: Settings of the probes, by name.

        Raises:
            CommandError: If the run fails for another reason than a ``DriftError``, or leaves no
                ledger.
        """
        folder, variables = self._prepare(dump=dump, filled=filled, probes=probes)
        title = f"{folder.name.replace('-', ' ')}, {stage}"
        if segment is not None:
            words: dict[str, Any] = {"variables": variables, "later": later}
            run = run_segment(self._runs, segment, folder.name, title, **words)
        else:
            watch = None if watched is None else PairWatch((watched, folder))
            run = self._runs.run(
                folder.name,
                title,
                variables=variables,
                may_fail=True,
                later=later,
                killed_when=(lambda: False) if watch is None else watch.differs,
            )
        self._check(run)
        self.files.note_run()
        return run, folder / "dump"

    def _prepare(
        self, *, dump: str = "", filled: bool = False, probes: Mapping[str, str]
    ) -> tuple[Path, dict[str, str]]:
        """Return the folder of the next run, and its variables."""
        folder = self._runs.output / f"run-{next(self._numbers):03d}"
        variables = {f"LIGHTNING_D9M_{name.upper()}": text for name, text in probes.items()}
        variables |= (_FILLED if filled else {}) | {WATCH: str(folder)}
        if dump:
            place = escape_name(dump)  # and its leaves
            variables |= {_DUMP: str(folder / "dump"), _DUMP_NAMES: f"{place},{place}:[!:]*"}
        return folder, {**self._variables, **variables}

    @staticmethod
    def _check(run: Run) -> None:
        """Raise the failure of a run, unless a difference between ranks ended it."""
        if run.failure is not None:
            ends = [fit.outcome(rank).end for fit in run.fits.values() for rank in fit.files]
            if not any(end is not None and is_drift(end) for end in ends):
                raise run.failure

    def run_first(self, stage: str, **probes: str) -> list[tuple[Run, Path]]:
        """Run twice, and compare while the runs train; both end where they first differ."""
        made = [self._prepare(probes=probes) for _ in range(_PAIR)]
        folders = [folder for folder, _ in made]
        variables = [{**own, INTERRUPT: KEEP, FOLDER: str(folder / KEPT)} for folder, own in made]
        watch = PairWatch((folders[0], folders[1]))
        names = [folder.name for folder in folders]
        title = f"runs 1 and 2, {stage}"
        runs = self._runs.run_beside(names, title, variables, watch.differs)
        self.files.note_run()
        if runs[1].failure is not None and runs[0].failure is None:
            # They may need a port, a device or memory that only one of them can have.
            self._numbers = count(_PAIR)
            shutil.rmtree(folders[1], ignore_errors=True)
            words: dict[str, Any] = dict(probes)
            return [(runs[0], folders[0] / "dump"), self.run(stage, watched=folders[0], **words)]
        for run in runs:
            self._check(run)
        return [(run, folder / "dump") for run, folder in zip(runs, folders, strict=True)]

    def run_pairs(
        self,
        stage: str,
        tries: int,
        *,
        segment: Segment | None = None,
        dump: str = "",
        filled: bool = False,
        **probes: str,
    ) -> Iterator[RunPair]:
        """Run, and yield how each further run compares with the first one.

        Whole runs are ``2 * tries``. A segment is run up to 50 times, as long as this takes no
        longer than the first look did; the other arguments are those of ``run``.

        Raises:
            CommandError: If a run fails, if two leave different ledgers, or if a run ends with a
                ``DriftError`` that neither the comparison of the runs nor that of the ranks shows.
        """
        begun = time.monotonic()
        self._looks += 1
        words: dict[str, Any] = {"segment": segment, "dump": dump, "filled": filled, **probes}
        if stage == _WHOLE and self._beside:
            first, *others = self.run_first(stage, **probes)
        else:
            self._announce(stage)
            first, others = self.run(stage, later=1, **words), []
        made = 1
        while others or made < 2 * tries or (segment is not None and self._allows(made, begun)):
            if not others:
                watched = first[1].parent if stage == _WHOLE else None
                others = [self.run(stage, watched=watched, **words)]
            made += 1
            yield self._compare(first, others.pop())
        if stage == _WHOLE:
            self._seconds = time.monotonic() - begun

    def _announce(self, stage: str) -> None:
        if self._runs.seconds is not None:
            look = f"look {self._looks} of at most {_MOST_LOOKS}: {stage}"
            print(look, file=sys.stderr, flush=True)

    def _allows(self, made: int, begun: float) -> bool:
        """Return whether a segment is run once more, for a rare difference."""
        return made < _MOST_SEGMENTS and time.monotonic() - begun < self._seconds

    def _compare(self, first: tuple[Run, Path], second: tuple[Run, Path]) -> RunPair:
        runs = [first, second]
        expected, actual = (run.fits for run, _ in runs)
        if expected.keys() != actual.keys() and not self._is_cut(expected, actual):
            raise CommandError(
                f"The two runs left different ledgers: {', '.join(expected)} and "
                f"{', '.join(actual)}. Each run must fit the same models in the same order."
            )
        dumps = tuple(dump for _, dump in runs)
        both = [name for name in expected if name in actual]
        pairs = [
            RunPair(
                name,
                compare_ledgers(expected[name], actual[name]),
                expected[name],
                len(both),
                number,
                dumps,
                actual[name],
            )
            for number, name in enumerate(both)
        ]
        pair = next((pair for pair in pairs if pair.differs), None)
        error = next((run.failure for run, _ in runs if run.failure is not None), None)
        if pair is None and error is not None:
            drifting = (replace(own, rank_drift=find_rank_drift(own.expected)) for own in pairs)
            pair = next((found for found in drifting if found.rank_drift), None)
            if pair is None:
                raise error
        return pair or pairs[-1]

    @staticmethod
    def _is_cut(expected: Mapping[str, Ledger], actual: Mapping[str, Ledger]) -> bool:
        """Return whether a run was ended where it differs, so that it lacks later fits."""
        fewer = min(expected, actual, key=len)
        last = list(fewer.values())[-1] if fewer else None
        return last is not None and last.outcome(min(last.files)).end is None


def escape_name(name: str) -> str:
    """Return a pattern that matches one name; a comma, which separates patterns, becomes ``?``."""
    return re.sub(r"([*?[])", r"[\1]", name).replace(",", "?")


_WHOLE = "whole run"
_FIRST = "steps of the epoch"
_SECOND = "modules of the step"
_OPERATIONS = "operations of "
_VALUES = "values"
_RANK_PROBES = "weight,buffer,optimizer,gradient"
_STEPS = "rng,weight,buffer,optimizer,batch,loss,local_gradient,gradient,scalar,monitor"
_MODULES = f"{_STEPS},input,output,grad_output"
_OPS = f"{_MODULES},op"
_MOST_LINES = 5
_MOST_SEGMENTS = 50
_PAIR = 2
# The folder of the checkpoints that a run keeps for later looks.
KEPT = "kept"


@dataclass
class SearchResult:
    """The result of a search.

    Attributes:
        cause: The kind of cause; None if no runs differed.
        divergences: The first place of each rank that diverges first, as far as it was narrowed
            down.
        ranks: Number of ranks.
        pair: The runs in which it occurred.
        looks: The outcome of each look, as text.
        op: The evidence on the operation, if the place is one.
        magnitude: How far the values are apart at the first place, unless it is an operation.
        reference_rank: The rank whose values are the expected ones, if ranks of one run differ.
        lines: Lines of the program that may explain the cause, the likeliest first.
        outside: What the program read from outside before it differed, the nearest first.
        samples: How the samples of the epoch compare, if the batches differ and it is known.
        generators: Paths of the generators in the data, if the batches differ and nothing else
            explains it.
        left: A sentence on files through which a run may have changed later ones.
        writer: What ran when the first place was written; empty if it is not known.
        tries: Most pairs of runs for each look.
    """

    cause: Cause | None = None
    divergences: tuple[Divergence, ...] = ()
    ranks: int = 1
    pair: RunPair | None = None
    looks: list[str] = field(default_factory=list)
    op: "OpFinding | None" = None
    magnitude: "Magnitude | None" = None
    reference_rank: int | None = None
    lines: list[Finding] = field(default_factory=list)
    outside: list[OutsideRead] = field(default_factory=list)
    samples: str = ""
    generators: list[str] = field(default_factory=list)
    left: str = ""
    writer: str = ""
    tries: int = 1

    @property
    def explained(self) -> str:
        """The effect that lines may explain: the cause, or that the inputs of the model differ.

        A loop without a Trainer has its batches as these.
        """
        inputs = self.divergences and self.divergences[0].kind == "input"
        return "inputs" if inputs else self.cause.kind if self.cause else ""

    @property
    def advice(self) -> str:
        """Instructions for the user; empty if there are none."""
        advice = "" if self.cause is None else self.cause.advice
        if not self.generators:
            return advice
        return (
            f"{advice} Generators that the data holds: {escape(', '.join(self.generators))}. Seed "
            "each of them, or draw from torch's global generator."
        )

    def as_json(self) -> dict[str, Any]:
        """Return the result for ``--json``."""
        if self.cause is None:
            return {"verdict": "equal", "runs": 2 * self.tries, "looks": self.looks}
        named = ("moment", "epoch", "step", "batch", "kind", "name", "call", "count")
        place = {name: getattr(first, name) for first in self.divergences[:1] for name in named}
        magnitude = self.magnitude if self.op is None else self.op.magnitude
        measured = magnitude and magnitude.as_record()
        op = None
        if self.op is not None:
            patch = self.op.patch and self.op.patch.name
            op = vars(self.op) | {"magnitude": measured, "patch": patch}
        further = {
            "fit": self.pair and self.pair.fit,
            "op": op,
            "magnitude": None if op is not None else measured,
            "reference_rank": self.reference_rank,
            "lines": [finding.as_record() for finding in self.lines] or None,
            "outside": [read.as_record() for read in self.outside] or None,
            "samples": self.samples or None,
            "generators": self.generators or None,
            "left": self.left or None,
            "writer": self.writer or None,
        }
        return {
            "verdict": "different",
            "looks": self.looks,
            "cause": self.cause.kind,
            "text": self.cause.text,
            "advice": self.advice,
            "ranks": [entry.rank for entry in self.divergences],
            **place,
            **{name: value for name, value in further.items() if value is not None},
        }


def describe_place(found: Sequence[Divergence]) -> str:
    """Return the first place at which runs diverge, as text."""
    if not found:
        return "no place that both runs have"
    first = found[0]
    when = f"epoch {first.epoch}, step {first.step}"
    if first.moment == "batch":
        when += f", {describe_batch(first.batch)}"
    elif first.moment in ("initial", "final"):
        when = f"the {first.moment} state"
    call = f", call {first.call}" if first.call else ""
    return f"{when}: {escape(name_value(first.kind, first.name))}{call}"


class Search:
    """Narrows down a divergence.

    The first look compares two runs step by step. Later ones run only a segment again: from the
    last checkpoint at which the runs were equal to the step in which they differ, with more probes.

    Args:
        runner: Runs the command in pairs.
        tries: Most pairs of whole runs for the first look, until one differs.
    """

    def __init__(self, runner: Runner, tries: int) -> None:
        self._runner = runner
        self._tries = tries
        self._gone = False  # whether no pair of a later look differs
        self._found = SearchResult(tries=tries)
        self._low = 0
        self._first: RunPair | None = None  # the first that differed; its runs keep checkpoints
        self._resumes = True  # until a resume fails
        self._probes: dict[str, str] = {}

    def locate(self) -> SearchResult:
        """Return what was found, even if a later look fails or is interrupted."""
        found = self._found
        try:
            self._narrow()
        except (Exception, KeyboardInterrupt) as error:
            if found.cause is None:
                raise
            found.looks.append(f"stopped: {type(error).__name__}: {error}")
        if found.cause is not None:
            found.lines = find_cause_lines(self._runner.command, found.explained)[:_MOST_LINES]
            self._find_outside()
        if self._gone:
            found.left = self._runner.files.describe(first_alone=True)
        return found

    def _find_outside(self) -> None:
        """Find what the program read from outside, unless an operation alone is the cause."""
        found, pair = self._found, self._found.pair
        alone = found.op is not None and found.op.outcomes > 1
        if alone or pair is None or found.reference_rank is not None:
            return
        first = found.divergences[0] if found.divergences else None
        name, folders = pair.expected.path.name, [dump.parent for dump in pair.dumps]
        found.outside = find_reads(folders, name, first)[:_MOST_LINES]
        if first is not None:
            found.samples = describe_samples(folders, name, first)
            unexplained = all(read.kind in UNLIKELY for read in found.outside) and not any(
                explains(line.rule, found.explained) for line in found.lines
            )
            if found.explained in ("data", "inputs") and unexplained:
                found.generators = list_generators(folders[0], name, first.rank)

    def _narrow(self) -> None:
        """Look closer and closer; each look adds to what was found."""
        pair = self._look(_WHOLE, probes=_STEPS)
        if pair is not None and pair.rank_drift is not None:
            self._look_at_ranks(pair, pair.rank_drift)
            return
        while pair is not None:
            pair = self._look_into_step(pair)
        self._look_at_values()

    def _look_into_step(self, pair: RunPair) -> RunPair | None:
        """Narrow from a step to its operations; return a pair that diverged in an earlier epoch."""
        known, found = self._found.cause, self._found.divergences
        if known is None or not found:
            return None
        first = found[0]
        segment = self._choose_segment(first)
        self._low = pair.steps_of_epoch(first.epoch)[0] if segment is None else segment.first
        if not known.narrows and not (first.moment == "final" and first.step > self._low):
            return None
        steps = f"{self._low}:{first.step + 1}"
        seen = self._look(_SECOND, probes=_MODULES, probe_steps=steps)
        if seen is None:
            return None
        if self._found.divergences[0].epoch < first.epoch:
            return seen
        if self._found.cause is None or not self._found.cause.narrows:
            return None
        # Operations of other modules are left out: the program may compute more there that differs
        # and is not the cause.
        first = self._found.divergences[0]
        module = name_module(first)
        name = escape_name(module)
        selection = {} if module == ROOT else {"probe_modules": f"{name},{name}.*"}
        # The validation at the end of an epoch belongs to the epoch's last step.
        step = first.step - (first.moment in ("epoch", EXCEPTION))
        steps = f"{step}:{step + 1}"
        self._look(f"{_OPERATIONS}{module}", probes=_OPS, probe_steps=steps, **selection)
        return None

    def _choose_segment(self, first: Divergence) -> Segment | None:
        """Return the part of a run that a look at a place needs; None for the whole run.

        It begins before the step in which the place was written, at a checkpoint that the run has
        kept, and ends after the step that differs. Variables reach only the first fit of a program.
        """
        pair = self._first
        if pair is None or pair.actual is None or pair.actual.header.fit:
            return None
        start = None
        if self._resumes and first.moment != "initial":
            points = RecordedRun(pair.actual.path).points
            kept = [own for own in points if own.path.parent.name == KEPT and own.is_there]
            start = next((own for own in kept[::-1] if own.step < first.step), None)
        return Segment(start, first.step + 1)

    def _look_at_values(self) -> None:
        """Save the values of the first place that differs, and measure how far they are apart."""
        from lightning_d9m.engine.probes.dumps import find_writer
        from lightning_d9m.tools.locate.op_evidence import (
            examine_op,
            measure_recorded,
            measure_saved,
            name_op,
        )

        found = self._found
        if not found.divergences or found.pair is None:
            return
        if found.pair.comparison.stack and not found.pair.comparison.portable:
            return
        if found.cause is not None and found.cause.kind == "length":
            return
        first, initial = found.divergences[0], found.divergences[0].moment == "initial"
        found.magnitude = measure_recorded(first)
        draws = first.moment == "batch" and first.kind == "rng"
        kind = "rng" if draws else kind_of_place(first)
        if found.magnitude is not None or kind is None or not (self._probes or initial):
            return
        self._low = first.step if initial else self._low
        # For state, save the step before too: if it differs there, the cause lies elsewhere.
        start = max(self._low, first.step - 1) if kind in STATE else first.step
        steps = f"{start}:{first.step + 1}"
        settings = {"probes": _STEPS} | self._probes | {"probe_steps": steps}
        name = name_op(first.name) if kind == "op" else first.name
        pair = self._look(_VALUES, dump=name, **settings)
        at = None if pair is None else _find_again(first, earliest_divergences(pair.comparison)[0])
        if pair is None or at is None:
            return
        if kind in WRITTEN:
            found.writer = find_writer(pair.dumps, first.rank)
        if kind != "op":
            found.magnitude = None if draws else measure_saved(at, kind, pair.dumps)
            return
        found.op = examine_op(at, pair.dumps)
        inputs_differ = found.op is not None and not found.op.inputs_equal
        if inputs_differ and found.cause is not None and found.cause.kind == "op":
            pairs = self._runner.run_pairs(
                "filled memory", self._tries, segment=self._choose_segment(first), filled=True
            )
            differ = any(pair.differs for pair in pairs)
            runs = f"nothing differs in {2 * self._tries} runs"
            found.looks.append(f"filled memory: {'the runs still differ' if differ else runs}")
            found.cause = OUTSIDE if differ else UNINITIALIZED

    def _look_at_ranks(self, pair: RunPair, drift: Divergence) -> None:
        """Find the step, tensor and index of a drift between ranks that every run has."""
        from lightning_d9m.tools.locate.op_evidence import measure_saved

        self._found.pair, self._found.ranks = pair, len(pair.expected.files)
        self._report_ranks("whole run", drift, steps_seen=False)
        low = drift.step
        # Probes hold the digests of shards, which are not compared across ranks.
        if drift.moment != "initial" and not pair.expected.header.stack.get(SHARDED_PARAMETERS):
            stage = "steps of the epoch"
            low, high = pair.steps_of_epoch(drift.epoch)
            _, narrowed = self._run_ranks(pair, stage, f"{low}:{max(high, low + 1)}")
            if narrowed is None or narrowed.epoch > drift.epoch:
                self._found.looks.append(f"{stage}: the drift did not occur again")
                return
            drift = narrowed
            self._report_ranks(stage, drift, steps_seen=True)
        kind = kind_of_place(drift)
        if kind is None:  # the state of a scheduler
            return
        # The step before shows that the ranks were still equal there.
        steps = f"{max(low, drift.step - 1)}:{drift.step + 1}"
        dump, again = self._run_ranks(pair, _VALUES, steps, dump=drift.name)
        if again is None or (again.step, again.kind) != (drift.step, drift.kind):
            self._found.looks.append(f"{_VALUES}: the drift did not occur again")
            return
        self._found.looks.append(f"{_VALUES}: {describe_place([again])}")
        ranks = (reference_rank(drift), drift.rank)
        self._found.magnitude = measure_saved(drift, kind, [dump, dump], ranks=ranks)

    def _run_ranks(
        self, pair: RunPair, stage: str, steps: str, dump: str = ""
    ) -> tuple[Path, Divergence | None]:
        """Run once; return the folder of dumps, and where its ranks differ."""
        run, saved = self._runner.run(stage, dump=dump, probes=_RANK_PROBES, probe_steps=steps)
        return saved, find_rank_drift(run.fits[pair.fit]) if pair.fit in run.fits else None

    def _report_ranks(self, stage: str, drift: Divergence, *, steps_seen: bool) -> None:
        self._found.divergences = (drift,)
        self._found.reference_rank = reference_rank(drift)
        self._found.cause = find_rank_cause(drift, steps_seen=steps_seen)
        self._found.looks.append(f"{stage}: {describe_place([drift])}")

    def _is_caught(self, stage: str, found: Sequence[Divergence], steps: str) -> bool:
        """Return whether a look saw the beginning of the known divergence or of an earlier one.

        It must begin at a probe within the steps: if state already differs when the first probed
        step begins, the cause lies before that step. A divergence at the end of an epoch whose
        steps are all probed began after them.
        """
        known = self._found.divergences
        if not known or not found:
            return not known
        first = found[0]
        if stage == _VALUES and _find_again(known[0], first) is None:
            return False
        module = stage.removeprefix(_OPERATIONS)
        if module not in (stage, ROOT) and not f"{name_module(first)}.".startswith(f"{module}."):
            return False  # it entered the module from outside, where no operations are probed
        if first.moment in ("epoch", EXCEPTION):
            whole = stage == _FIRST or (stage == _SECOND and known[0].moment == first.moment)
            return stage == _VALUES or (whole and first.epoch <= known[0].epoch)
        if first.moment != "batch":
            return stage == _VALUES
        start = int(steps.partition(":")[0])
        began = first.kind in STATE and not first.call  # an optimizer's state is probed again
        return not (first.step == start > self._low and began)

    def _look(self, stage: str, *, dump: str = "", **probes: str) -> RunPair | None:
        """Run until a run differs from the first one, and record it; None if none does."""
        known = self._found.divergences
        segment = self._choose_segment(known[0]) if known else None
        try:
            return self._look_at(stage, segment, dump, probes)
        except CommandError:
            if segment is None or segment.start is None:
                raise
        # As where the resume is refused: the state of the program cannot be saved.
        self._resumes = False
        self._found.looks.append(f"{stage}: the runs could not resume, so they begin at step 0")
        return self._look_at(stage, replace(segment, start=None), dump, probes)

    def _look_at(
        self, stage: str, segment: Segment | None, dump: str, probes: Mapping[str, str]
    ) -> RunPair | None:
        missed = made = 0
        words: dict[str, Any] = {"segment": segment, "dump": dump, **probes}
        for pair in self._runner.run_pairs(stage, self._tries, **words):
            made += 1
            if pair.rank_drift and stage == _WHOLE:
                return pair
            if not pair.differs:
                continue
            found = self._found
            divergences = earliest_divergences(pair.comparison)
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
            found.ranks = max(1, len(pair.comparison.ranks))
            found.pair, self._first = pair, self._first or pair
            found.looks.append(f"{stage}: {describe_place(divergences)}")
            self._probes = dict(probes)
            return pair
        runs = pluralize(made + 1, "run")
        self._gone |= not missed and stage != _WHOLE
        outcome = "nothing differs" if stage == _WHOLE else "the divergence did not occur again"
        elsewhere = f", {missed} of {made} pairs differ elsewhere" if missed else ""
        self._found.looks.append(f"{stage}: {outcome} in {runs}{elsewhere}")
        return None


def _find_again(known: Divergence, first: Divergence) -> Divergence | None:
    """Return a known place as a different pair shows it, if it has the first kind that differs.

    With a race condition, the first differing place of that kind is a different one in each pair.
    """
    if (first.moment, first.kind) != (known.moment, known.kind):
        return None
    own = (known.kind, known.name, known.call)
    again = [place for place in first.places if (place.kind, place.name, place.call) == own]
    return replace(first, places=[*again, *first.places]) if again else None


def find_cause_lines(command: Sequence[str], cause: str) -> list[Finding]:
    """Scan the program of a command and the modules beside it that it imports.

    Returns:
        The findings of the rules that explain the cause, the likeliest first; then what is certain
        and explains others. An empty cause has these alone.
    """
    program = find_program(command)
    if program is None:
        return []
    scans = [scan_file(str(path), frozenset(_ANY)) for path in _list_modules(program)]
    found = [finding for scan in scans for finding in scan.findings]
    found = [one for one in found if explains(one.rule, cause) or one.certainty == "certain"]
    order = (*_RULES.get(cause, ()), *_ANY)
    return sorted(found, key=lambda f: (order.index(f.rule), f.certainty != "certain"))


def explains(rule: str, cause: str) -> bool:
    """Return whether what a rule finds can be a cause of this kind."""
    return rule in _RULES.get(cause, ())


def find_program(command: Sequence[str]) -> Path | None:
    """Return the Python file that a command runs, or None.

    >>> find_program(["no-such-program", "--fast"])
    """
    for flag, word in zip(("", *command), command, strict=False):
        candidates = [Path(word)]
        if flag == "-m":
            stem = Path(*word.split("."))
            candidates = [stem.with_suffix(".py"), stem / "__main__.py"]
        for path in candidates:
            if path.suffix == ".py" and path.is_file():
                return path
    return None


def _list_modules(program: Path) -> Iterator[Path]:
    """Yield the program and, transitively, the files that it imports from its folder."""
    waiting, seen = [program], {program}
    while waiting and len(seen) <= _MOST_FILES:
        path = waiting.pop(0)
        yield path
        try:
            tree = ast.parse(read_python(path.read_bytes()).text)
        except (OSError, SourceError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue  # the scan reports such a file
        for name in sorted(set(list_imports(tree))):
            parts = name.split(".")
            for folder in (program.parent, path.parent):
                for end in range(1, len(parts) + 1):
                    stem = folder.joinpath(*parts[:end])
                    found = (stem.with_suffix(".py"), stem / "__init__.py")
                    new = [file for file in found if file not in seen and file.is_file()]
                    waiting += new
                    seen.update(new)
