"""Train 40 small parameters in a plain loop and write the digests of each way of fusing.

Usage: fusion.py FOLDER groups|ours REPETITIONS
"""

import json
import os
import sys
from pathlib import Path

import models
import torch
from torch.nn import functional

folder, mode, repetitions = sys.argv[1:]
if mode == "ours":
    from lightning_d9m.horovod import environment

    environment.set_variables(initialized=False, stall_seconds=60)
else:
    assert "HOROVOD_FUSION_THRESHOLD" not in os.environ
import horovod.torch as hvd  # noqa: E402 - after the variables, as in the strategy

STEPS = 2
hvd.init()
torch.set_num_threads(1)


def train(reduced):
    """Train from a fixed start; ``reduced(model, optimizer)`` returns the function of a step."""
    torch.manual_seed(1)
    model = models.many_small_layers(20)
    models.jitter(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = reduced(model, optimizer)
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(STEPS):
        inputs = torch.randn(16, 24, generator=generator)
        step(functional.mse_loss(model(inputs), inputs.roll(1, 1)))
    return models.digest(model)


def repeat(reduced):
    """Return the digests of several trainings."""
    return [train(reduced) for _ in range(int(repetitions))]


def groups(size):
    """Reduce so many gradients at a time, as Horovod's fusion does with those that are ready."""

    def reduced(model, optimizer):
        def step(loss):
            optimizer.zero_grad()
            loss.backward()
            gradients = [parameter.grad for parameter in model.parameters()]
            for start in range(0, len(gradients), size):
                hvd.grouped_allreduce_(gradients[start : start + size])  # returns when it is done
            optimizer.step()

        return step

    return reduced


def buckets(size, communicator, *, shares_memory=True):
    """Reduce with our buckets; a size of 0 reduces each gradient alone."""
    from lightning_d9m.horovod.gradient_sums import WatchedGradients
    from lightning_d9m.logical_ranks.tree import Blocks

    def reduced(model, optimizer):
        own = WatchedGradients(
            communicator,
            model.named_parameters(),
            Blocks(hvd.size(), hvd.size()),
            hvd.rank(),
            communicator.process_group,
            bucket_bytes=size,
        )
        own._exchange._is_asked = not shares_memory

        def step(loss):
            optimizer.zero_grad()
            with own.backward():
                loss.backward()
            own.finish(hvd.rank())
            optimizer.step()

        return step

    return reduced


if mode == "ours":
    from lightning_d9m.horovod.communication.communicator import Communicator

    communicator, result = Communicator(hvd), {}
    for transport in ("horovod", "torch"):
        if transport == "torch":
            communicator.connect(limit_seconds=60)
        for fusion, size in (("static", 16384), ("off", 0)):
            result[f"{fusion} over {transport}"] = repeat(buckets(size, communicator))
        # As between hosts.
        result[f"messages of {transport}"] = repeat(
            buckets(16384, communicator, shares_memory=False)
        )
    communicator.disconnect()
else:
    result = {str(size): repeat(groups(size)) for size in (1, 3, 100)}
Path(folder, f"rank-{hvd.rank()}.json").write_text(json.dumps(result))
