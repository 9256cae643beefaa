"""Probes in a fit: they see everything in order, change nothing, and leave nothing behind."""

import json
import re
from itertools import groupby
from types import SimpleNamespace

import pytest
import torch
from ledger_runs import list_batches
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.checkpoint import checkpoint
from trainings import make_model

from lightning_d9m import probe
from lightning_d9m.engine.hashing.digest import digest
from lightning_d9m.engine.ledger.kinds import PROBE_KINDS, VALIDATION
from lightning_d9m.engine.probes.evidence import find_writer, read_evidence
from lightning_d9m.engine.probes.module_hooks import OpMode
from lightning_d9m.engine.probes.settings import ProbeSettings
from lightning_d9m.errors import SettingError
from lightning_d9m.tools.comparison.ledgers import compare_ledgers
from lightning_d9m.tools.locate.search import describe_place


def read_probes(ledger, rank=0):
    """Return, for each batch, its places with their digests, in order."""
    batches = list_batches(ledger, rank)
    return {(epoch, batch): entries for epoch, _, batch, entries in batches}


def places_of(ledger, *kinds):
    """Return the places of the first batch, of some kinds."""
    first = next(iter(read_probes(ledger).values()))
    return [place for place, _ in first if not kinds or place[0] in kinds]


def final(ledger):
    return ledger.outcome(0).final


def count_hooks(model):
    tensors = [p._post_accumulate_grad_hooks for p in model.parameters()]
    modules = [
        hooks
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
    ]
    return sum(len(hooks) for hooks in [*tensors, *modules] if hooks)


def test_every_kind_is_met_in_order_with_its_digest_and_not_a_bit_changes(fit):
    seen = []

    def step(self, batch, batch_idx):
        images, classes = batch
        with torch.profiler.record_function("marked"):
            hidden = probe.monitor(self.layers(images), "logits")
        loss = nn.functional.cross_entropy(hidden, classes)
        self.log("train_loss", loss)
        seen.append((images, loss.detach()))
        return loss

    plain = fit(model=make_model(training_step=step))
    probed = fit(model=make_model(training_step=step), probes="all")
    assert final(probed) == final(plain)
    places = places_of(probed)
    kinds = [kind for kind, _, _ in places]
    assert set(kinds) == set(PROBE_KINDS)
    first = {kind: kinds.index(kind) for kind in PROBE_KINDS}
    order = ("rng", "weight", "buffer", "optimizer", "batch", "input", "op", "output", "monitor")
    late = ("loss", "grad_output", "local_gradient", "gradient", "scalar")
    assert [*order, *late] == sorted(first, key=first.__getitem__)
    numbers = [batch for _, batch in read_probes(probed)]
    assert len([batch for batch in numbers if batch < VALIDATION]) == 12
    assert {batch for batch in numbers if batch >= VALIDATION} == {VALIDATION + n for n in range(6)}
    assert ("op", "layers.0::aten.addmm.default", 0) in places
    assert ("op", "layers.0::aten.mm.default", 0) in places  # of the backward pass
    assert ("gradient", "layers.0.weight", 0) in places
    assert ("scalar", "train_loss", 0) in places
    digests = dict(read_probes(probed)[0, 0])
    images, loss = map(digest, seen[-12])
    assert (digests["batch", "batch:0", 0], digests["loss", "loss", 0]) == (images, loss)
    weight = digest(make_model().layers[0].weight)
    assert digests["weight", "layers.0.weight", 0] == weight
    without = ("aten.view", "aten.empty", "profiler")
    assert not [name for _, name, _ in places if any(own in name for own in without)]


def test_records_come_in_the_order_of_what_they_tell(fit):
    """However fast the batches were: those of an epoch precede its digests."""
    ledger = fit(probes=["loss"], trainer_max_epochs=2)
    kinds = [json.loads(line)["kind"] for line in ledger.files[0].read_text().splitlines()]
    assert [kind for kind, _ in groupby(kinds)] == [
        *("header", "run", "digests", "layout"),
        *("probes", "evaluation", "digests"),
        *("probes", "evaluation", "digests", "end"),
    ]
    epochs = [epoch for epoch, *_ in list_batches(ledger)]
    assert epochs == sorted(epochs)
    assert set(epochs) == {0, 1}


def test_modules_and_steps_are_selected_by_settings_and_variables(fit, monkeypatch):
    """A pattern that fits nothing is named."""
    with pytest.warns(UserWarning, match=r"has 'encodr\.\*', and no .* are 'layers', 'layers\.0',"):
        ledger = fit(
            probes=["output", "weight"], probe_modules=["encodr.*", "layers.0"], probe_steps="2:4"
        )
    assert places_of(ledger) == [
        ("weight", "layers.0.weight", 0),
        ("weight", "layers.0.bias", 0),
        ("output", "layers.0", 0),
    ]
    assert list(read_probes(ledger)) == [(0, 2), (0, 3)]
    monkeypatch.setenv("LIGHTNING_D9M_PROBES", "loss")
    monkeypatch.setenv("LIGHTNING_D9M_PROBE_STEPS", "1:2")
    ledger = fit(probes="weight")
    assert list(read_probes(ledger)) == [(0, 1)]
    assert places_of(ledger) == [("loss", "loss", 0)]
    assert ledger.header.settings["probes"] == "loss"
    monkeypatch.setenv("LIGHTNING_D9M_PROBES", "lost")
    with pytest.raises(SettingError, match="Did you mean 'loss'"):
        fit()


def test_nothing_stays_behind_after_the_end_or_an_error(fit):
    def fail(self, batch, batch_idx):
        if batch_idx == 1:
            raise RuntimeError("stop")
        return self.layers(batch[0]).sum()

    for model in (make_model(), make_model(training_step=fail)):
        try:
            fit(model=model, probes="all")
        except RuntimeError as error:
            assert str(error) == "stop"  # noqa: PT017 - one of the two fails
        assert count_hooks(model) == 0
        strategy = fit.trainer.strategy
        assert not {"training_step", "backward"} & set(vars(strategy))
        assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
        assert probe.monitor(1, "nobody listens") == 1


def use_shared(model):
    shared = nn.Linear(32, 32)
    model.layers = nn.Sequential(nn.Linear(64, 32), shared, nn.ReLU(), shared, nn.Linear(32, 10))


def checkpointed(reentrant):
    def step(self, batch, batch_idx):
        hidden = checkpoint(self.layers, batch[0].requires_grad_(), use_reentrant=reentrant)
        return nn.functional.cross_entropy(hidden, batch[1])

    return lambda model: setattr(type(model), "training_step", step)


def script(model):
    model.layers = torch.jit.script(model.layers)


WHOLE = {(kind, "layers", 0) for kind in ("input", "output", "grad_output")}
WEIGHT = {(kind, "layers.0.weight", 0) for kind in ("weight", "local_gradient", "gradient")}
AGAIN = {("output", "layers.0", 1), ("op", "layers.0::aten.addmm.default", 1)}


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        # It is called twice under its first name.
        (use_shared, {("output", "layers.1", 0), ("output", "layers.1", 1)}),
        # It is seen again when it runs again.
        (checkpointed(reentrant=False), AGAIN),
        (checkpointed(reentrant=True), AGAIN),
        (script, WHOLE | WEIGHT | {("buffer", "layers.1.running_mean", 0)}),
    ],
    ids=["shared", "checkpointed", "reentrant", "TorchScript"],
)
def test_probes_of_unusual_modules_change_no_bit(fit, change, expected):
    ledgers = []
    for probes in ((), "all"):
        model = make_model()
        change(model)
        ledgers.append(fit(model=model, probes=probes))
    plain, probed = ledgers
    assert final(probed) == final(plain)
    places = places_of(probed)
    assert expected <= set(places)
    if change is script:
        assert any(kind == "op" and name.startswith("layers::") for kind, name, _ in places)
    if change is use_shared:
        assert not [place for place in places if place[1] == "layers.3"]  # its second name


@pytest.mark.parametrize("scope", [{}, {"__name__": "torch.x"}, {"__name__": "json"}])
def test_a_compiled_module_is_seen_from_outside_and_stays_compiled(
    fit, tmp_path, monkeypatch, scope
):
    compiled = []
    generated = tmp_path / "torchinductor_user" / "x.py"
    generated.parent.mkdir()
    generated.write_text("def call(*args):\n    return forward(*args)\n")

    def count(graph, _):
        compiled.append(graph)
        space = scope | {"forward": graph.forward}
        exec(compile(generated.read_text(), generated, "exec"), space)  # noqa: S102 - as Inductor does
        return space["call"]

    def make(**words):
        torch._dynamo.reset()
        compiled.clear()
        model = make_model()
        model.layers[0] = torch.compile(model.layers[0], backend=count)
        ledger = fit(model=model, **words)
        return ledger, len(compiled)

    plain, graphs = make()
    monkeypatch.setenv("LIGHTNING_D9M_EVIDENCE", "x")
    probed, probed_graphs = make(probes="all")
    assert final(probed) == final(plain)
    assert graphs == probed_graphs > 0
    names = [name for _, name, _ in places_of(probed, "output")]
    assert names.count("layers.0") == 1
    # Its line is the program's, and not the one in the function that the compiler generates.
    lines = {
        own["source"].partition(": ")[2]
        for (_, _, name, _), own in read_evidence(probed.path, 0)["ops"].items()
        if name.startswith("layers.0::") and "addmm" in own["op"]
    }
    assert lines
    assert all("cross_entropy(self.layers(images), classes)" in line for line in lines)


def test_evidence_has_each_operation_until_the_next_batch_begins(fit, monkeypatch):
    """Those of the optimizer and of hooks, too; the lines are those of the program."""
    monkeypatch.setenv("LIGHTNING_D9M_EVIDENCE", "x")
    ledger = fit(probes="op", probe_steps="1:2")
    found = read_evidence(ledger.path, 0)
    # An operation with several outputs has a place for each of them.
    places = {(re.sub(r":\d$", "", n), c) for (_, n, c), _ in read_probes(ledger)[0, 1]}
    ops = {(name, call): own for (_, _, name, call), own in found["ops"].items()}
    assert places <= ops.keys()
    assert any("addcdiv_" in name for name, _ in ops)
    for name in ("layers.0::aten.addmm.default", "layers.4::aten.mm.default"):
        assert "trainings.py" in ops[name, 0]["source"]
        assert "in training_step: loss = " in ops[name, 0]["source"]


def flip_a_bit(self, batch, batch_idx):
    if self.faulty and self.global_step == 3:
        with torch.no_grad():
            self.layers[4].bias.view(torch.int32)[2] ^= 1 << 20


def change_the_scale(self, outputs, batch, batch_idx):
    if self.faulty and batch_idx == 2:
        self.trainer.precision_plugin.scaler.update(2.0**15)


def change_a_moment(self):
    if self.faulty and self.trainer.global_step == 2:
        state = self.optimizers().optimizer.state[self.layers[0].weight]
        state["exp_avg"].view(-1)[0] += 1


def validate_others(self, batch, batch_idx):
    images = batch[0] + (1 if self.faulty and batch_idx == 1 else 0)
    self.log("val_loss", nn.functional.cross_entropy(self.layers(images), batch[1]))


def scaled():
    return {"trainer_plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]}


# Lightning calls callbacks first: the weight was read before the module's own hook wrote it. What
# changes an optimizer within a step would otherwise be a difference of the next step's weights. A
# validation belongs to the step before it.
CHANGES = [
    ("on_train_batch_start", flip_a_bit, dict, (3, "op", "layers.4::aten.addmm.default", 0)),
    ("on_train_batch_end", change_the_scale, scaled, (3, "optimizer", "scaler.scale", 0)),
    ("on_after_backward", change_a_moment, dict, (2, "optimizer", "0.exp_avg.layers.0.weight", 1)),
    ("validation_step", validate_others, dict, (5, "op", "(model)::aten.add.Tensor", 0)),
]


@pytest.mark.parametrize(("hook", "change", "words", "expected"), CHANGES)
def test_a_change_shows_at_its_step_and_name(fit, hook, change, words, expected):
    ledgers = []
    for faulty in (False, True):
        model = make_model(**{hook: change})
        model.faulty = faulty
        ledgers.append(fit(model=model, probes="all", **words()))
    found = compare_ledgers(*ledgers).ranks[0].divergence
    assert (found.step, found.kind, found.name, found.call) == expected
    if hook == "validation_step":
        assert (found.epoch, found.batch) == (0, VALIDATION + 1)
        assert "batch 1 of the validation" in describe_place([found])


# In a validation, and after a batch.
PLACES = [
    ("Net", "on_validation_batch_end", 6),
    ("Scaling", "on_train_batch_end", 3),
]


@pytest.mark.parametrize(("owner", "hook", "step"), PLACES)
def test_the_line_that_wrote_is_named(fit, monkeypatch, owner, hook, step):
    """Whichever hook of the module or of a callback it is in."""

    def run(factor):
        def scale(self, *args, **kwargs):
            now = model.trainer.global_step == step and not done
            if now:
                done.append(True)
                model.layers[0].weight.data.mul_(factor)
            return getattr(super(type(self), self), hook)(*args, **kwargs)

        done = []
        model = make_model(**({hook: scale} if owner == "Net" else {}))
        callback = type("Scaling", (Callback,), {} if owner == "Net" else {hook: scale})()
        ledger = fit(model=model, probes=("weight",), trainer_callbacks=[callback])
        assert done
        return read_evidence(ledger.path, 0)

    monkeypatch.setenv("LIGHTNING_D9M_EVIDENCE", "layers.0.weight")
    monkeypatch.setenv("LIGHTNING_D9M_EVIDENCE_OPS", "1")
    monkeypatch.setenv("LIGHTNING_D9M_PROBE_STEPS", f"{step - 1}:{step + 1}")
    said = find_writer(run(1.0), run(1.5), "")
    assert said.startswith("by aten.mul_.Tensor, called at ")
    assert said.endswith(" in scale: model.layers[0].weight.data.mul_(factor)")


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient.sinh()  # in the backward pass


class Double(nn.Module):
    def forward(self, x):
        y = Doubled.apply(x).sigmoid()
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient.cosh())  # in a hook
        return y.square()


@pytest.fixture
def called(fit, monkeypatch):
    """Return the evidence of one step on a module's operations, by their names."""
    monkeypatch.setenv("LIGHTNING_D9M_EVIDENCE", "x")
    model = make_model()
    model.layers.append(Double())
    ledger = fit(model=model, probes="op", probe_steps="0:1", trainer_max_epochs=1)
    ops = read_evidence(ledger.path, 0)["ops"].items()
    own = [content for (_, _, name, _), content in ops if name.startswith("layers.5::")]
    return {content["op"].split(".")[1]: content for content in own}


@pytest.mark.parametrize(
    ("op", "line", "backward"),
    [
        ("sigmoid", "y = Doubled.apply(x).sigmoid()", False),
        ("sigmoid_backward", "y = Doubled.apply(x).sigmoid()", True),
        ("sinh", "return gradient.sinh()  # in the backward pass", False),
        ("cosh", "y.register_hook(lambda gradient: gradient.cosh())  # in a hook", False),
    ],
)
def test_each_operation_has_the_line_that_called_it(called, op, line, backward):
    """In a backward pass that is a line of the program's own, or the forward operation's."""
    assert called[op]["source"].endswith(f": {line}")
    assert called[op]["backward"] is backward


@pytest.mark.parametrize("is_complete", [True, False])
@pytest.mark.parametrize("method", ["then", "add_done_callback"])
def test_a_callback_of_a_future_is_probed_in_no_thread(method, is_complete):
    """As that of a communication hook, which runs here or in another thread."""
    seen, called = [], []
    probes = SimpleNamespace(listens=True, add=lambda kind, name, value: seen.append(name))
    before = dict(vars(torch._C.Future))
    future, value = torch.futures.Future(), torch.ones(2)
    if is_complete:
        future.set_result(value)
    with OpMode(nn.Module(), ProbeSettings(probes="op"), probes).entered():
        getattr(future, method)(lambda done: called.append(done.value().mul(2)))
        if not is_complete:
            future.set_result(value)
        value.neg()
    assert len(called) == 1
    assert seen == ["(model)::aten.neg.default"]
    assert dict(vars(torch._C.Future)) == before


class Odd(nn.Module):
    """Has a traced part, a part whose shape the first batch gives, and returns a leaf."""

    def __init__(self):
        super().__init__()
        traced = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.traced = torch.jit.trace(traced, torch.ones(2, 16))
        self.late, self.same = nn.LazyLinear(16), nn.Identity()
        self.prompt = torch.zeros(16, requires_grad=True)

    def forward(self, values):
        return self.late(self.traced(values)) + self.same(self.prompt)


@pytest.mark.filterwarnings("ignore:.*Lazy modules", "ignore:.*torch.jit", "ignore:.*ScriptModule")
def test_modules_of_any_kind_are_probed_and_keep_no_hook(fit):
    odd = Odd()

    def step(self, batch, _):
        images, _ = batch
        return odd(images.flatten(1)[:, :16]).square().mean()

    model = make_model(training_step=step)
    model.odd = odd
    probes = ["output", "grad_output", "local_gradient"]
    ledger = fit(model=model, probes=probes, probe_modules=["odd", "odd.*"])
    batches = [*read_probes(ledger).values()]
    names = [[(kind, name) for (kind, name, _), _ in entries] for entries in batches[1:]]
    assert ("local_gradient", "odd.late.weight") in names[0]
    assert all(later == names[0] for later in names)
    assert not odd.prompt._backward_hooks
