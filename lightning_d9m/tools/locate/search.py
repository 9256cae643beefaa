"""The search for the first divergence of runs of one command, and its result."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_d9m.engine.ledger.differences import Divergence, list_varying_ops, name_value
from lightning_d9m.engine.ledger.kinds import STATE, STEP, WRITTEN, describe_batch
from lightning_d9m.errors import CommandError
from lightning_d9m.text import escape, pluralize
from lightning_d9m.tools.comparison.causes import (
    AFTER_STEP,
    OUTSIDE,
    OUTSIDE_NUMBER,
    UNINITIALIZED,
    Cause,
    earliest_divergences,
    find_cause,
    find_rank_cause,
    kind_of_place,
)
from lightning_d9m.tools.comparison.ledgers import (
    compare_ledgers,
    find_rank_drift,
    reference_rank,
)
from lightning_d9m.tools.lint.rules import Finding
from lightning_d9m.tools.locate.cause_lines import explains, find_cause_lines
from lightning_d9m.tools.locate.outside import (
    UNLIKELY,
    OutsideRead,
    describe_samples,
    find_reads,
    list_generators,
)
from lightning_d9m.tools.locate.runner import KEPT, WHOLE, Runner, RunPair
from lightning_d9m.tools.segments.goto import record_operations
from lightning_d9m.tools.segments.segment import (
    RecordedRun,
    SavedPoint,
    Segment,
)

if TYPE_CHECKING:
    from lightning_d9m.tools.comparison.numeric_difference import Magnitude
    from lightning_d9m.tools.locate.op_evidence import OpFinding

_FIRST = "steps of the epoch"
_OPERATIONS = "operations of the step"
_MODULES = "modules of the step"
_VALUES = "values"
_RANK_PROBES = "weight,buffer,optimizer,gradient"
# All that is cheap to digest at each step, so that the first look names the step. The kinds that a
# step begins with rule out causes before it; two gradients tell an exchange from the backward pass.
_STEPS = "rng,weight,buffer,optimizer,batch,loss,local_gradient,gradient,scalar,monitor"
_MODULE_PROBES = f"{_STEPS},input,output,grad_output"
_OP_PROBES = f"{_MODULE_PROBES},op"
# torch fills new memory only while deterministic algorithms are on.
_FILLED = {"control": "on", "fill_uninitialized_memory": "1"}
# Of each step and module, whatever the program selects.
_EVERYWHERE = {"probe_steps": ":", "probe_modules": "*"}
# The kinds of causes of two runs that running a part of them again adds nothing to.
_KNOWN = ("stack", "incomparable")
# The likeliest are first; a longer list would hide them.
_MOST_LINES = 5


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
        agreement: With which of two runs that exist the new runs agree; empty without them.
        writer: What ran when the first place was written; empty if it is not known.
        varying_ops: Ops that some of the runs allowed although they may vary.
        runs: Number of runs that were made.
        last: The two runs that were compared last.
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
    agreement: str = ""
    writer: str = ""
    varying_ops: tuple[str, ...] = ()
    runs: int = 0
    last: RunPair | None = None

    @property
    def verdict(self) -> str:
        """As ``Comparison.verdict``: ``"incomplete"`` if a run was cut off and nothing differs."""
        shown = self.pair or self.last
        if shown is not None and shown.comparison.verdict == "incomplete":
            return "incomplete"
        return "equal" if self.cause is None else "different"

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
        varying = {"varying_ops": self.varying_ops} if self.varying_ops else {}
        if self.cause is None:
            return {"verdict": self.verdict, "runs": self.runs, "looks": self.looks} | varying
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
            "outside": list(map(asdict, self.outside)) or None,
            "samples": self.samples or None,
            "generators": self.generators or None,
            "writer": self.writer or None,
            "agreement": self.agreement or None,
        }
        return {
            "verdict": self.verdict,
            "looks": self.looks,
            "cause": self.cause.kind,
            "text": self.cause.text,
            "advice": self.advice,
            "ranks": [entry.rank for entry in self.divergences],
            **place,
            **{name: value for name, value in further.items() if value is not None},
            **varying,
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
    elif first.is_end:
        when += ", where a run ended"
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
        self._found = SearchResult()
        self._low = 0  # the step at which a segment begins
        self._first: RunPair | None = None  # the first that differed; its runs keep checkpoints
        # Checkpoints at which the runs were equal; None until they differ in the first fit.
        self._points: list[SavedPoint] | None = None
        self._resumes = True  # until a resume fails
        self._probes: dict[str, str] = {}

    def locate(self, between: tuple[RecordedRun, RecordedRun] | None = None) -> SearchResult:
        """Return what was found, even if a later look fails or is interrupted.

        ``between`` are two runs that exist. Then the first look is the segment in which they part.
        """
        found = self._found
        try:
            if between is None:
                self._narrow(self._look(WHOLE, probes=_STEPS, **_EVERYWHERE))
            elif self._note_known(*between):
                self._narrow(self._look_between(*between))
        # SystemExit: a time limit, Slurm and CI send SIGTERM, which raises it.
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            if found.cause is None:
                raise
            by_signal = isinstance(error, KeyboardInterrupt | SystemExit)
            reason = "by a signal" if by_signal else f"{type(error).__name__}: {error}"
            found.looks.append(f"stopped: {reason}")
        found.looks[:0] = self._runner.failed
        if found.cause is not None:
            found.lines = find_cause_lines(self._runner.command, found.explained)[:_MOST_LINES]
            self._find_outside()
        found.runs = len(self._runner.made)
        ledgers = [ledger for run in self._runner.made for ledger in run.fits.values()]
        ledgers += (run.ledger for run in between or ())
        found.varying_ops = list_varying_ops(*(ledger.header for ledger in ledgers))
        return found

    def _find_outside(self) -> None:
        """Find what the program read from outside, unless an operation alone is the cause."""
        found, pair = self._found, self._found.pair
        alone = found.op is not None and found.op.outcomes > 1
        if alone or pair is None or pair.actual is None or found.reference_rank is not None:
            return
        first = found.divergences[0] if found.divergences else None
        name = pair.expected.path.name
        folders = [run.path.parent for run in (pair.expected, pair.actual)]
        found.outside = find_reads(folders, name, first)[:_MOST_LINES]
        if first is not None:
            found.samples = describe_samples(folders, name, first)
            unexplained = all(read.kind in UNLIKELY for read in found.outside) and not any(
                explains(line.rule, found.explained) for line in found.lines
            )
            if found.explained in ("data", "inputs") and unexplained:
                found.generators = list_generators(folders[0], name, first.rank)

    def _note_known(self, expected: RecordedRun, actual: RecordedRun) -> bool:
        """Note where two runs that exist part; return whether they do within the training."""
        found, ledgers = self._found, (expected.ledger, actual.ledger)
        found.pair = RunPair(ledgers[0].path.name, compare_ledgers(*ledgers), ledgers[0])
        if not found.pair.differs:
            return False
        found.cause = find_cause(found.pair.comparison)
        found.divergences = earliest_divergences(found.pair.comparison)
        found.looks.append(f"the two runs: {describe_place(found.divergences)}")
        # What ended a run is in its log: a step that runs again would only be equal.
        is_within = any(not own.is_end for own in found.divergences)
        return is_within and found.cause.kind not in _KNOWN

    def _look_between(self, expected: RecordedRun, actual: RecordedRun) -> RunPair | None:
        """Run the segment in which two runs part again, and tell with which one that agrees."""
        found = self._found
        first = found.divergences[0]
        # They were equal at the end of the epoch before, and, with probes, before the step.
        ends = (end for end in expected.epoch_ends if end < first.step)
        equal = first.step if first.moment == "batch" else max(ends, default=0)
        stop = first.step + (first.moment != STEP)
        # Both have recorded the state after the first steps behind a checkpoint: these narrow the
        # part from an epoch to the steps between two of them, without a run.
        both = expected.step_totals.keys() & actual.step_totals.keys()
        equal = max(equal, *(step for step in both if step < first.step), 0)
        self._points = [
            point
            for run in (expected, actual)
            for point in run.points
            if point.is_there and point.step <= equal
        ]
        segment = self._choose_segment(first, stop)
        assert segment is not None, "a recorded run is the first fit of its program"
        steps = f"{segment.first}:{stop}"
        pair = self._look_at(_FIRST, segment, {"probes": _STEPS, "probe_steps": steps})
        counts = [
            sum(known.compare(run).equal for run in self._runner.made)
            for known in (expected, actual)
        ]
        made = len(self._runner.made)
        found.agreement = (
            f"Of {pluralize(made, 'new run')} of steps {segment.first:,} to {stop:,}, "
            f"{counts[0]} agree with the reference and {counts[1]} with the other run."
        )
        # Two runs that agree with both show nothing of the difference.
        if pair is None and max(counts) == made > min(counts):
            other = "the other run" if counts[0] == made else "the reference"
            found.agreement += (
                f" So {other} is the one that parted from what the program computes here: by "
                "something rare, such as a race, by its machine, or by an input that has changed "
                "since."
            )
        elif pair is None and not max(counts):
            found.agreement += (
                " They agree with each other: the program, its data or the machine is not what it "
                "was in both runs."
            )
        return pair

    def _narrow(self, pair: RunPair | None) -> None:
        """Look closer; each look adds to what was found."""
        if pair is not None and pair.rank_drift is not None:
            self._look_at_ranks(pair, pair.rank_drift)
        elif pair is not None:
            self._look_into_step()
            first = next(iter(self._found.divergences), None)
            if first is not None and first.kind == "op":
                self._examine_op(first)
            elif first is not None:
                self._look_at_values(first)

    def _look_into_step(self) -> None:
        """Narrow from a step to its operations, or to its modules."""
        known, found = self._found.cause, self._found.divergences
        if known is None or not known.narrows or not found:
            return
        first = found[0]
        # The validation at the end of an epoch belongs to the epoch's last step.
        # What a step that begins late finds written, the operations of the one before wrote.
        late = known.kind == "weights"
        step = max(0, first.step - (late or first.moment in AFTER_STEP))
        probed = {"probe_steps": f"{step}:{step + 1}", "probe_modules": "*"}
        probed["evidence"] = first.name
        # One look instead of two, modules first: each costs two starts of the program. But a
        # race may not come back while each operation is recorded.
        look = partial(self._look, _OPERATIONS, probes=_OP_PROBES, **probed)
        looks = self._found.looks
        if record_operations(look, lambda said: looks.append(f"{_OPERATIONS}: {said}")) is None:
            self._look(_MODULES, probes=_MODULE_PROBES, **probed)

    def _choose_segment(self, first: Divergence, stop: int | None = None) -> Segment | None:
        """Return the part of a run that a look at a place needs; None for the whole run.

        It begins before the step in which the place was written, at a checkpoint that the run has
        kept, and ends after the step that differs. Variables reach only the first fit of a program.
        """
        pair = self._first
        if self._points is None and pair is not None and pair.actual and pair.is_first:
            points = RecordedRun(pair.actual.path).points
            self._points = [own for own in points if own.path.parent.name == KEPT and own.is_there]
        if self._points is None:
            return None
        usable = self._points if self._resumes and first.moment != "initial" else []
        # Before the step, because state that differs where it begins was written in the one before.
        before = [point for point in usable if point.step < max(1, first.step)]
        start = max(before, key=lambda point: point.step, default=None)
        self._low = 0 if start is None else start.step
        return Segment(start, first.step + 1 if stop is None else stop)

    def _examine_op(self, first: Divergence) -> None:
        """Take the evidence that the second run has on an operation."""
        from lightning_d9m.tools.locate.op_evidence import examine_op

        found = self._found
        if found.pair is not None and found.pair.actual is not None:
            found.op = examine_op(first, found.pair.actual)
        if found.op is not None and not found.op.inputs_equal:
            self._explain_inputs(first, only_numbers=found.op.only_numbers_differ)

    def _look_at_values(self, first: Divergence) -> None:
        """Measure how far the values of the first place that differs are apart."""
        from lightning_d9m.engine.probes.evidence import find_writer, read_evidence
        from lightning_d9m.tools.locate.op_evidence import (
            measure_kept,
            measure_recorded,
            name_moment,
        )

        found = self._found
        if found.cause is None or found.cause.kind in ("stack", "length"):
            return
        initial = first.moment == "initial"
        found.magnitude = measure_recorded(first)
        draws = first.moment == "batch" and first.kind == "rng"
        kind = "rng" if draws else kind_of_place(first)
        if found.magnitude is not None or kind is None or not (self._probes or initial):
            return
        # For state, save the step before too: if it differs there, the cause lies elsewhere.
        segment = self._choose_segment(first)
        begin = first.step if initial else 0 if segment is None else segment.first
        start = max(begin, first.step - 1) if kind in STATE else first.step
        steps = f"{start}:{first.step + 1}"
        settings = {"probes": _STEPS} | self._probes | {"probe_steps": steps}
        settings |= {"evidence": first.name}
        settings |= {"evidence_ops": "1"} if kind in WRITTEN and not initial else {}
        pair = self._look(_VALUES, **settings)
        at = None if pair is None else _find_again(first, earliest_divergences(pair.comparison)[0])
        if pair is None or pair.actual is None or at is None:
            return
        runs = (pair.expected, pair.actual)
        one, other = (read_evidence(own.path, first.rank) for own in runs)
        # State was read when the batch began; gradients are of the batch itself.
        begins = kind in STATE and at.moment == "batch" and not at.call
        found.writer = find_writer(one, other, name_moment(at) if begins else "")
        found.magnitude = None if draws else measure_kept(at, kind, runs)

    def _explain_inputs(self, first: Divergence, *, only_numbers: bool) -> None:
        """Find the cause of inputs that differ although no operation wrote them."""
        found = self._found
        if only_numbers:
            found.cause = OUTSIDE_NUMBER
            return
        # An operation that draws may write into memory that nothing has filled, so tensors that
        # differ there say nothing about its cause.
        if found.cause is not None and found.cause.kind != "op":
            return
        pairs = self._runner.run_pairs(
            "filled memory", self._tries, segment=self._choose_segment(first), **_FILLED
        )
        differ, made = False, 1  # run; each pair has one more
        for pair in pairs:
            differ, made = pair.differs, made + 1
            if differ:
                break
        runs = f"nothing differs in {made} runs"
        found.looks.append(f"filled memory: {'the runs still differ' if differ else runs}")
        found.cause = OUTSIDE if differ else UNINITIALIZED

    def _look_at_ranks(self, pair: RunPair, drift: Divergence) -> None:
        """Find the step, tensor and index of a drift between ranks that every run has."""
        from lightning_d9m.tools.locate.op_evidence import measure_kept

        self._found.pair, self._found.ranks = pair, len(pair.expected.files)
        self._found.divergences = (drift,)
        self._found.reference_rank = reference_rank(drift)
        self._found.cause = find_rank_cause(drift)
        self._found.looks.append(f"{WHOLE}: {describe_place([drift])}")
        kind = kind_of_place(drift)
        if kind is None:  # the state of a scheduler
            return
        # The step before shows that the ranks were still equal there.
        steps = f"{max(0, drift.step - 1)}:{drift.step + 1}"
        settings: dict[str, Any] = {"probes": _RANK_PROBES, "probe_steps": steps}
        settings["evidence"] = drift.name
        ledger = self._runner.run(_VALUES, **settings).fits.get(pair.fit)
        again = None if ledger is None else find_rank_drift(ledger)
        if ledger is None or again is None or (again.step, again.kind) != (drift.step, drift.kind):
            self._found.looks.append(f"{_VALUES}: the drift did not occur again")
            return
        self._found.looks.append(f"{_VALUES}: {describe_place([again])}")
        ranks = (reference_rank(drift), drift.rank)
        self._found.magnitude = measure_kept(drift, kind, [ledger, ledger], ranks=ranks)

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
        # The values of another place say nothing about this one.
        if stage == _VALUES and _find_again(known[0], first) is None:
            return False
        # The probed steps end before it: a difference that began after them is another one, unless
        # the known one was found there, too.
        if first.moment in AFTER_STEP:
            same = (first.moment, first.epoch) == (known[0].moment, known[0].epoch)
            return stage in (_FIRST, _VALUES) or same
        if first.moment != "batch":
            return stage == _VALUES
        start = int(steps.partition(":")[0])
        began = first.kind in STATE and not first.call  # an optimizer's state is probed again
        return not (first.step == start > self._low and began)

    def _look(self, stage: str, **settings: str) -> RunPair | None:
        """Run until a run differs from the first one, and record it; None if none does."""
        known = self._found.divergences
        segment = self._choose_segment(known[0]) if known else None
        try:
            return self._look_at(stage, segment, settings)
        except CommandError:
            if segment is None or segment.start is None:
                raise
        # The resume is refused, or the state of the program cannot be saved. The look is made once
        # more from the beginning, which needs no state.
        looks = len(self._found.looks)
        pair = self._look_at(stage, replace(segment, start=None), settings)
        # Only now: the look may have failed for another reason.
        self._resumes = False
        said = f"{stage}: the runs could not resume, so they begin at step 0"
        self._found.looks.insert(looks, said)
        return pair

    def _look_at(
        self, stage: str, segment: Segment | None, settings: Mapping[str, str]
    ) -> RunPair | None:
        missed = made = 0
        words: dict[str, Any] = {"segment": segment, **settings}
        for pair in self._runner.run_pairs(stage, self._tries, **words):
            made, self._found.last = made + 1, pair
            if pair.rank_drift and stage == WHOLE:
                return pair
            if not pair.differs:
                continue
            found = self._found
            divergences = earliest_divergences(pair.comparison)
            steps = settings.get("probe_steps", "")
            same_fit = found.pair is None or pair.fit == found.pair.fit
            if not same_fit or not self._is_caught(stage, divergences, steps):
                missed += 1
                continue
            if stage == _VALUES:
                again = _find_again(found.divergences[0], divergences[0])
                found.looks.append(f"{stage}: {describe_place([again] if again else [])}")
                return pair
            found.cause = find_cause(pair.comparison, batches_seen=bool(pair.comparison.probes))
            found.divergences = divergences
            found.ranks = max(1, len(pair.comparison.ranks))
            found.pair, self._first = pair, self._first or pair
            found.looks.append(f"{stage}: {describe_place(divergences)}")
            self._probes = dict(settings)
            return pair
        runs = pluralize(made + 1, "run")
        outcome = "nothing differs" if stage == WHOLE else "the divergence did not occur again"
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
