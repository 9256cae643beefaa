"""One rank of `benchmarks/ranks/horovod_fusion.py`: trains a workload and writes steps per second.

Usage: horovod_worker.py MODE WORKLOAD STEPS FOLDER
"""

import hashlib
import json
import os
import resource
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from lightning_d9m.engine.ranks.groups import ranks_of_group
from lightning_d9m.engine.ranks.ranks import agree

mode, workload, steps, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
WARM_UP = 4
torch.set_num_threads(1)


class Shapes(nn.Module):
    """The parameters of a ResNet-50 (25.6 million), each with a gradient that costs one pass."""

    def __init__(self):
        super().__init__()
        shapes = [(64, 3, 7, 7), (64,), (64,)]
        inputs = 64
        for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
            for block in range(blocks):
                outputs = 4 * width
                kernels = [(width, inputs, 1, 1), (width, width, 3, 3), (outputs, width, 1, 1)]
                if block == 0:
                    kernels.append((outputs, inputs, 1, 1))
                for kernel in kernels:
                    shapes += [kernel, (kernel[0],), (kernel[0],)]
                inputs = outputs
        shapes += [(1000, 2048), (1000,)]
        self.parts = nn.ParameterList(torch.randn(shape) * 0.01 for shape in shapes)

    def forward(self, x):
        """Mix every parameter into one number."""
        scale = x.mean()
        for part in self.parts:
            scale = scale + 1e-3 * part.square().mean() * scale
        return scale


def make_workload():
    """Return a model, a function that draws inputs and targets, and a criterion."""
    torch.manual_seed(0)
    if workload == "small":
        layers = [module for _ in range(75) for module in (nn.Linear(32, 32), nn.Tanh())]

        def draw(generator):
            x = torch.randn(16, 32, generator=generator)
            return x, x.roll(1, 1)

        return nn.Sequential(*layers), draw, functional.mse_loss
    if workload == "digits":
        model = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(),
            nn.Linear(128, 10),
        )  # fmt: skip

        def draw(generator):
            x = torch.randn(32, 1, 8, 8, generator=generator)
            return x, torch.randint(10, (32,), generator=generator)

        return model, draw, functional.cross_entropy

    def draw(generator):
        return torch.randn(8, generator=generator), torch.zeros(())

    return Shapes(), draw, functional.mse_loss


def poll_and_sleep(hvd):
    """Make Horovod's own optimizer poll and sleep as ours does, which is faster on few cores."""
    optimizer = sys.modules["horovod.torch.optimizer"]
    spinning = optimizer.synchronize

    def synchronize(handle):
        while not hvd.poll(handle):
            time.sleep(0.0002)
        return spinning(handle)

    optimizer.synchronize = synchronize


def distribute(model, optimizer):
    """Return the rank, the model to call, the optimizer, and our sums or None."""
    if mode == "ddp":
        torch.distributed.init_process_group("gloo")
        # forward_sync_buffers=False, because the other modes reduce gradients only.
        parallel = nn.parallel.DistributedDataParallel(
            model, forward_sync_buffers=False, gradient_as_bucket_view=True
        )
        return torch.distributed.get_rank(), parallel, optimizer, None
    if mode.startswith("static"):
        from lightning_d9m.engine.control.environment import EarlyVariables
        from lightning_d9m.integrations.strategies.horovod.environment import (
            connect_store,
            list_variables,
        )
        from lightning_d9m.integrations.strategies.sums.gradients import (
            BUCKET_BYTES,
            LogicalGradients,
        )
        from lightning_d9m.integrations.strategies.sums.malloc import disable_malloc_trim
        from lightning_d9m.integrations.strategies.sums.tree import Blocks

        EarlyVariables(list_variables(600)).set()
        import horovod.torch as hvd

        hvd.init()
        if mode != "static-trimming":
            disable_malloc_trim()
        rank, size = hvd.rank(), hvd.size()
        store = connect_store(hvd, timedelta(seconds=600))
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
        sums = LogicalGradients(
            model.named_parameters(),
            Blocks(size, size),
            rank,
            bucket_bytes=int(os.environ.get("D9M_BUCKET_BYTES", BUCKET_BYTES)),
        )
        return hvd.rank(), model, optimizer, sums
    import horovod.torch as hvd

    hvd.init()
    if mode != "default-spinning":
        poll_and_sleep(hvd)
    return hvd.rank(), model, hvd.DistributedOptimizer(optimizer, model.named_parameters()), None


def main():
    """Train, and write the measurements."""
    model, draw, criterion = make_workload()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    rank, forward, optimizer, sums = distribute(model, optimizer)
    generator = torch.Generator().manual_seed(rank)
    began = busy = 0.0
    faults = 0
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
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    total = hashlib.sha256()
    for parameter in model.parameters():
        total.update(parameter.detach().numpy().tobytes())
    found = {
        "steps_per_second": steps / seconds,
        "cpu_seconds_per_step": busy / steps,
        "page_faults_per_step": faults / steps,
        "digest": total.hexdigest()[:16],
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))


main()
