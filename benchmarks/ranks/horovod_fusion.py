"""Steps per second and peak memory of ways to reduce gradients on four processes, alternating.

    python benchmarks/ranks/horovod_fusion.py        all workloads, about 30 minutes on two cores
    python benchmarks/ranks/horovod_fusion.py --rounds 1 --workloads small --modes static ddp

Four processes on this machine, Gloo, one thread each. Each round launches every mode once, so that
load affects all modes alike, and ratios are those of one round. Horovod's own modes poll and sleep
while they wait, as ours do, except ``default-spinning``, unmodified Horovod. ``static-trimming``
(glibc returns freed memory to the system) is measured only on request.
Results go to ``benchmarks/results/horovod-fusion.json``.
"""

import argparse
import hashlib
import resource
import statistics
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from lightning_d9m.engine.control.environment import EarlyVariables
from lightning_d9m.engine.ranks.groups import ranks_of_group
from lightning_d9m.engine.ranks.ranks import agree
from lightning_d9m.integrations.strategies.horovod.environment import connect_store, list_variables
from lightning_d9m.integrations.strategies.sums.gradients import LogicalGradients
from lightning_d9m.integrations.strategies.sums.malloc import disable_malloc_trim
from lightning_d9m.integrations.strategies.sums.tree import Blocks

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "cost"))
from measurement import (
    RESULTS,
    alternate,
    describe_machine,
    keep,
    quartiles,
    ratios,
    run_ranks,
    write_rank,
)

# Steps of a launch; fewer for the mode that is far slower, so that a round stays short.
STEPS = {"small": 200, "digits": 150, "resnet50-shapes": 12}
SLOW_STEPS = {"small": 8, "digits": 40, "resnet50-shapes": 6}
WARM_UP = 4
OURS = "static"
MODES = ("default-spinning", "default", "threshold0", OURS, "ddp")
ON_REQUEST = ("static-trimming",)
RANKS = 4


class Shapes(nn.Module):
    """The parameters of a ResNet-50 (25.6 million), each with a gradient that costs one pass."""

    def __init__(self):
        from probe_models import ResNet50  # imports Lightning, which the other workloads need not

        super().__init__()
        shapes = [part.shape for part in ResNet50().parameters()]
        torch.manual_seed(0)
        self.parts = nn.ParameterList(torch.randn(shape) * 0.01 for shape in shapes)

    def forward(self, x):
        """Mix every parameter into one number."""
        scale = x.mean()
        for part in self.parts:
            scale = scale + 1e-3 * part.square().mean() * scale
        return scale


def make_small():
    """Return 75 small layers."""
    return nn.Sequential(*[one for _ in range(75) for one in (nn.Linear(32, 32), nn.Tanh())])


def draw_small(generator):
    """Return numbers, and the same numbers in another order."""
    x = torch.randn(16, 32, generator=generator)
    return x, x.roll(1, 1)


def make_digits():
    """Return a small convolutional network."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def draw_digits(generator):
    """Return images and classes."""
    x = torch.randn(32, 1, 8, 8, generator=generator)
    return x, torch.randint(10, (32,), generator=generator)


# What makes the model, what draws inputs and targets, and the criterion.
WORKLOADS = {
    "small": (make_small, draw_small, functional.mse_loss),
    "digits": (make_digits, draw_digits, functional.cross_entropy),
    "resnet50-shapes": (
        Shapes, lambda own: (torch.randn(8, generator=own), torch.zeros(())), functional.mse_loss
    ),
}  # fmt: skip


def poll_and_sleep(hvd):
    """Make Horovod's own optimizer poll and sleep as ours does, which is faster on few cores."""
    optimizer = sys.modules["horovod.torch.optimizer"]
    spinning = optimizer.synchronize

    def synchronize(handle):
        while not hvd.poll(handle):
            time.sleep(0.0002)
        return spinning(handle)

    optimizer.synchronize = synchronize


def distribute(mode, model, optimizer):
    """Return the rank, the model to call, the optimizer, and our sums or None."""
    if mode == "ddp":
        torch.distributed.init_process_group("gloo")
        # forward_sync_buffers=False, because the other modes reduce gradients only.
        parallel = nn.parallel.DistributedDataParallel(
            model, forward_sync_buffers=False, gradient_as_bucket_view=True
        )
        return torch.distributed.get_rank(), parallel, optimizer, None
    is_ours = mode.startswith(OURS)
    if is_ours:  # before Horovod is imported
        EarlyVariables(list_variables(600)).set()
    import horovod.torch as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    if not is_ours:
        if mode != "default-spinning":
            poll_and_sleep(hvd)
        return rank, model, hvd.DistributedOptimizer(optimizer, model.named_parameters()), None
    if mode != "static-trimming":
        disable_malloc_trim()
    store = connect_store(hvd, timedelta(seconds=600))
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    sums = LogicalGradients(model.named_parameters, Blocks(size, size), rank)
    return rank, model, optimizer, sums


def work(mode, workload, steps, folder):
    """Train as one rank, and write what it measured."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, draw, criterion = WORKLOADS[workload]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    rank, forward, optimizer, sums = distribute(mode, model, optimizer)
    generator = torch.Generator().manual_seed(rank)
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            began, busy = time.perf_counter(), time.process_time()
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        inputs, targets = draw(generator)
        optimizer.zero_grad()
        loss = criterion(forward(inputs), targets)
        with nullcontext() if sums is None else sums.backward():
            loss.backward()
        if sums is not None:
            agree(ranks_of_group(), "the backward pass")  # as the strategy does
            sums.finish(rank)
        optimizer.step()
    seconds, busy = time.perf_counter() - began, time.process_time() - busy
    used = resource.getrusage(resource.RUSAGE_SELF)
    total = hashlib.sha256()
    for parameter in model.parameters():
        total.update(parameter.detach().numpy().tobytes())
    found = {
        "steps_per_second": steps / seconds,
        "cpu_seconds_per_step": busy / steps,
        "page_faults_per_step": (used.ru_minflt - faults) / steps,
        "digest": total.hexdigest()[:16],
        "peak_mib": used.ru_maxrss / 1024,
    }
    write_rank(folder, found, rank)


def launch(mode, workload):
    """Run one mode on all ranks; return its measurements."""
    steps = (SLOW_STEPS if mode == "threshold0" else STEPS)[workload]
    words = ("--work", mode, workload, steps)
    fusion = {"HOROVOD_FUSION_THRESHOLD": "0"} if mode == "threshold0" else {}
    every = run_ranks(RANKS, __file__, *words, horovod=mode != "ddp", **fusion)
    found = {
        "steps_per_second": min(rank["steps_per_second"] for rank in every),
        "cpu_seconds_per_step": sum(rank["cpu_seconds_per_step"] for rank in every),
        "page_faults_per_step": max(rank["page_faults_per_step"] for rank in every),
        "peak_mib": max(rank["peak_mib"] for rank in every),
        "digest": every[0]["digest"],
        "ranks_agree": len({rank["digest"] for rank in every}) == 1,
    }
    print(f"{workload:16} {mode:16} {found['steps_per_second']:7.2f} steps/s", flush=True)
    return found


def summarize(runs, ours):
    """Return quartiles of a mode, the number of its digests, and the speed of ours over it."""
    speeds = [run["steps_per_second"] for run in runs]
    own = [run["steps_per_second"] for run in ours]
    return {
        "median_steps_per_second": statistics.median(speeds),
        "quartiles": quartiles(speeds),
        "peak_mib": statistics.median(run["peak_mib"] for run in runs),
        "digests": len({run["digest"] for run in runs}),
        "ours_against_it": ratios(own, speeds) if own else None,
        "runs": runs,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workloads", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--modes", nargs="+", choices=[*MODES, *ON_REQUEST], default=list(MODES))
    parser.add_argument("--output", type=Path, default=RESULTS / "horovod-fusion.json")
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.work:
        mode, workload, steps, folder = words.work
        work(mode, workload, int(steps), folder)
        return
    for workload in words.workloads:
        ways = {mode: partial(launch, mode, workload) for mode in words.modes}
        runs = alternate(ways, words.rounds)
        found = {mode: summarize(own, runs.get(OURS, [])) for mode, own in runs.items()}
        keep(words.output, {"machine": describe_machine(), "workloads": {workload: found}})


if __name__ == "__main__":
    main()
