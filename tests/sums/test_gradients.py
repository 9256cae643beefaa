"""Gradients of logical ranks have the same bits on every number of processes."""

import threading
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from logical_sums import average_leaves, bits, make_leaf
from rank_threads import run_processes
from torch import nn

from lightning_d9m.errors import RanksDisagreeError, SettingError
from lightning_d9m.integrations.strategies.sums.gradients import LogicalGradients
from lightning_d9m.integrations.strategies.sums.tree import Blocks

BUILDING = threading.Lock()
# Small and large gradients; of the largest, more than one chunk is added.
SHAPES = [(3, 4, 5, 5), (17,), (), (70, 90), (0, 3), (1000,), (130, 140), (66_000,)]


def make_parameters(dtype=torch.float32, shapes=SHAPES):
    return [
        (f"p{number}", nn.Parameter(torch.zeros(shape, dtype=dtype)))
        for number, shape in enumerate(shapes)
    ]


def make_gradients(ranks, dtype=torch.float32, *, missing=False, seed=0, **words):
    """Return the gradients of each logical rank, by parameter; some miss on request."""
    generator = torch.Generator().manual_seed(seed)
    rows = [[make_leaf(shape, dtype, generator, **words) for shape in SHAPES] for _ in range(ranks)]
    if missing:
        for rank, row in enumerate(rows):
            row[1] = None
            row[3] = row[3] if rank == ranks - 1 else None
            row[5] = None if rank % 3 == 1 else row[5]
            row[6] = None if rank % 3 == 2 else row[6]
    return rows


def set_gradients(named, row):
    for (_, parameter), gradient in zip(named, row, strict=True):
        parameter.grad = None if gradient is None else gradient.clone()


def run_step(sums, named, rows, block):
    for rank in block:
        set_gradients(named, rows[rank])
        (sums.finish if rank == block[-1] else sums.set_aside)(rank)
    return [bits(parameter.grad) for _, parameter in named]


def sum_on(processes, steps, dtype=torch.float32, **words):
    """Return the gradients after each step, on each process."""
    blocks = Blocks(len(steps[0]), processes)

    def train(process, group):
        named = make_parameters(dtype)
        sums = LogicalGradients(lambda: named, blocks, process, group, **words)
        found = [run_step(sums, named, rows, blocks.of(process)) for rows in steps]
        # Vectorized reductions of them have the same bits on every number of processes.
        assert not any(p.grad.data_ptr() % 64 for _, p in named if p.grad is not None and p.numel())
        sums.close()
        return found

    return run_processes(processes, train)


def expect(rows):
    return [bits(average_leaves(leaves)) for leaves in zip(*rows, strict=True)]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
)
@pytest.mark.parametrize(("ranks", "processes"), [(6, 1), (6, 2), (5, 3), (4, 4)])
def test_gradients_are_the_average_in_tree_order(ranks, processes, dtype):
    """Also missing ones, which turn -0.0 into 0.0, infinities and NaNs."""
    steps = [make_gradients(ranks, dtype)]
    steps.append(make_gradients(ranks, dtype, missing=True, awkward=not dtype.is_complex))
    for found in sum_on(processes, steps, dtype, bucket_bytes=2**12):
        assert found == [expect(rows) for rows in steps]


@pytest.mark.parametrize("processes", [1, 2])
def test_parameters_may_be_frozen_and_unfrozen_between_steps(processes):
    blocks = Blocks(4, processes)

    def train(process, group):
        named = make_parameters()
        sums = LogicalGradients(lambda: named, blocks, process, group)
        for frozen in ({0, 3}, {1}, set(), {1}):
            rows = make_gradients(4)
            for number, (_, parameter) in enumerate(named):
                parameter.requires_grad_(number not in frozen)
                for row in rows:
                    row[number] = None if number in frozen else row[number]
            assert run_step(sums, named, rows, blocks.of(process)) == expect(rows)
        sums.close()

    run_processes(processes, train)


def test_close_forgets_what_was_set_aside():
    named, rows = make_parameters(), make_gradients(4)
    sums = LogicalGradients(lambda: named, Blocks(4, 1), 0)
    set_gradients(named, rows[3])
    sums.set_aside(0)
    set_gradients(named, rows[2])
    sums.close()
    assert run_step(sums, named, rows, range(4)) == expect(rows)


def run_alone(sums, loss):
    with sums.backward():
        loss.backward()
    sums.finish(0)


def test_gradients_of_the_last_step_are_added():
    """As DDP does: zeroed in place, or added to by a second backward pass."""
    model = nn.Linear(200, 200)
    sums = LogicalGradients(model.named_parameters, Blocks(1, 1), 0)
    inputs = torch.randn(2, 200)
    for _ in range(2):
        run_alone(sums, model(inputs).sum())
    (once,) = torch.autograd.grad(model(inputs).sum(), [model.weight])
    assert torch.equal(model.weight.grad, once + once)
    model.zero_grad(set_to_none=False)
    run_alone(sums, model(inputs).sum())
    assert torch.equal(model.weight.grad, once)


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_compression_rounds_what_is_sent_and_the_sum(name, dtype):
    steps = [make_gradients(2)]
    for (found,) in sum_on(2, steps, compression=name):
        for each, leaves in zip(found, zip(*steps[0], strict=True), strict=True):
            assert each == bits(average_leaves([leaf.to(dtype) for leaf in leaves]).float())


def test_a_gradient_that_another_hook_takes_away_is_an_error():
    """An optimizer inside a backward hook would train one process alone."""
    model = nn.Linear(200, 200)
    model.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    sums = LogicalGradients(model.named_parameters, Blocks(1, 1), 0)
    sums.prepare()
    with pytest.raises(SettingError, match="'weight' was removed"):
        run_alone(sums, model(torch.ones(1, 200)).sum())


def test_sparse_gradients_are_made_dense():
    table = nn.Embedding(10, 3, sparse=True)
    sums = LogicalGradients(table.named_parameters, Blocks(2, 1), 0, op="sum")
    for rank, add in enumerate((sums.set_aside, sums.finish)):
        table(torch.tensor([rank, rank, 5])).sum().backward()
        add(rank)
    assert table.weight.grad[:, 0].tolist() == [2, 2, 0, 0, 0, 2, 0, 0, 0, 0]


def test_a_model_without_trained_parameters_has_nothing_to_sum():
    sums = LogicalGradients(nn.Identity().named_parameters, Blocks(2, 1), 0)
    sums.set_aside(0)
    sums.finish(1)


@pytest.mark.parametrize("shape", [(4, 3, 2, 2), (64, 32, 3, 3)])
def test_gradients_with_other_strides_than_their_parameter_are_added(shape):
    weight = nn.Parameter(torch.zeros(shape).to(memory_format=torch.channels_last))
    plain = nn.Parameter(torch.zeros(shape))
    sums = LogicalGradients(
        nn.ParameterDict({"weight": weight, "plain": plain}).named_parameters, Blocks(4, 1), 0
    )
    leaves = [torch.randn(shape) for _ in range(4)]
    expected = average_leaves(leaves)
    for rank, leaf in enumerate(leaves):
        last = leaf.to(memory_format=torch.channels_last)
        weight.grad, plain.grad = (last, leaf.clone()) if rank % 2 else (leaf.clone(), last)
        (sums.finish if rank == 3 else sums.set_aside)(rank)
    for parameter in (weight, plain):
        assert torch.equal(parameter.grad, expected)
        assert parameter.grad.stride() == parameter.stride()


def test_conjugated_gradients_are_added():
    named = make_parameters(torch.complex64, shapes=[(30,), (20_000,)])
    sums = LogicalGradients(lambda: named, Blocks(2, 1), 0, op="sum")
    for rank, add in enumerate((sums.set_aside, sums.finish)):
        for _, parameter in named:
            parameter.grad = torch.full_like(parameter, complex(rank, 1)).conj()
        add(rank)
    for _, parameter in named:
        assert torch.equal(parameter.grad, torch.full_like(parameter, 1 - 2j))


class Model(nn.Module):
    """Large and small parameters, a shared one, and one that only some logical ranks use."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(40, 500)
        self.shared = nn.Linear(500, 500)
        self.small = nn.Linear(500, 3)
        self.sometimes = nn.Linear(500, 200)
        self.never = nn.Parameter(torch.zeros(20_000))

    def forward(self, batch, rank):
        hidden = self.shared(self.shared(self.first(batch)).relu())
        out = self.small(hidden).sum(dim=1)
        return out + self.sometimes(hidden).mean() if rank in {1, 2} else out


def train_model(process, group, processes, bucket_bytes):
    """Return the gradients after each of two steps; alone, without an overlap."""
    block = Blocks(6, processes).of(process)
    with BUILDING:  # all threads draw from one generator
        torch.manual_seed(0)
        model = Model()
    words = {"bucket_bytes": bucket_bytes}
    sums = LogicalGradients(model.named_parameters, Blocks(6, processes), process, group, **words)
    found = []
    for step in range(2):
        model.zero_grad()
        for rank in block:
            generator = torch.Generator().manual_seed(100 * step + rank)
            batch = torch.randn(8, 40, generator=generator)
            with sums.backward() if processes > 1 or bucket_bytes else nullcontext():
                model(batch, rank).square().sum().backward()
            (sums.finish if rank == block[-1] else sums.set_aside)(rank)
        found.append([bits(parameter.grad) for parameter in model.parameters()])
    sums.close()
    return found


def test_the_overlap_with_the_backward_pass_changes_no_bit():
    alone = train_model(0, None, 1, 0)
    assert alone[0][0] is None  # `never`
    for processes, size in ((1, 2**18), (2, 0), (3, 2**18), (4, 2**18)):
        for found in run_processes(
            processes, partial(train_model, processes=processes, bucket_bytes=size)
        ):
            assert found == alone


def test_a_bucket_leaves_before_the_backward_pass_ends():
    model = nn.Sequential(*[nn.Linear(600, 600, bias=False) for _ in range(4)])
    sums = LogicalGradients(model.named_parameters, Blocks(2, 1), 0, bucket_bytes=2**20)
    launched = []
    model[0].weight.register_hook(lambda _: launched.append(sums._launched))
    for _ in range(2):
        model.zero_grad()
        for rank, end in enumerate((sums.set_aside, sums.finish)):
            with sums.backward():
                model(torch.ones(2, 600)).sum().backward()
            end(rank)
    # The first gradient arrives last, and by then all buckets before its own are on their way.
    assert launched == [0, 3, 0, 3]


def test_a_second_gradient_in_one_backward_pass_is_refused():
    model = nn.Linear(300, 300)
    sums = LogicalGradients(model.named_parameters, Blocks(1, 1), 0)
    model(torch.ones(1, 300)).sum().backward()
    sums.finish(0)
    model.zero_grad()
    with sums.backward():
        model(torch.ones(1, 300)).sum().backward()
        with pytest.raises(SettingError, match="'weight' got a second gradient"):
            model.weight.sum().backward()


def test_processes_that_train_other_parameters_are_reported():
    def train(process, group):
        model = nn.Linear(2, 2)
        model.bias.requires_grad_(process == 0)
        sums = LogicalGradients(model.named_parameters, Blocks(2, 2), process, group)
        words = r"rank 0: .* of 2 parameters with bias .*\n  rank 1: .* of 1 parameters"
        with pytest.raises(RanksDisagreeError, match=words):
            sums.finish(process)

    run_processes(2, train)


def test_a_parameter_that_is_frozen_after_the_forward_pass_gets_no_gradient():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    sums = LogicalGradients(model.named_parameters, Blocks(1, 1), 0, on_stray=pytest.fail)
    sums.prepare()
    loss = model(torch.ones(2, 4)).mean()
    model[1].requires_grad_(False)
    with sums.backward():
        loss.backward()
    sums.finish(0)
    assert [p.grad is None for p in model.parameters()] == [False, False, True, True]
    sums.close()
