"""A loop with a recorder, which may be stopped, resumed, disturbed and validated."""

import io

import torch
from torch import Tensor, nn
from trainings import make_loader

from lightning_d9m import Recorder, deterministic


def make_parts():
    model = nn.Sequential(
        nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)


def leave(model, optimizer, loader):
    return model, optimizer, loader, Tensor.backward


def train(  # noqa: PLR0913 - one keyword for each part of a loop
    folder, *, state=None, stop=None, kept=None, disturb=None, noise=None, prepare=leave,
    loading=None, first=None, epochs=2, loaders=1, accumulated=1, seed=3, size=96, **words,
):  # fmt: skip
    """Train; return the recorder, or the bytes of the state that was saved at batch ``stop``.

    With ``kept``, a list, they are added to it, and the training continues.

    With ``noise`` each epoch has a validation, and the noise disturbs the second batch of the first
    one.
    """
    with deterministic(seed=seed, threads=1):
        model, optimizer, scheduler = make_parts()
        loader, others = make_loader(size=size, **loading or {}), make_loader(size=32)
        model, optimizer, loader, backward = prepare(model, optimizer, loader)
        parts = model, optimizer, scheduler
        with Recorder(folder, model, optimizer, scheduler, **words) as run:
            if state is not None:
                saved = torch.load(io.BytesIO(state), weights_only=True)
                for part, own in zip(parts, saved["parts"], strict=True):
                    part.load_state_dict(own)
                run.load_state_dict(saved["run"])
            for epoch in range(run.next_epoch if first is None else first, epochs):
                batches = (batch for _ in range(loaders) for batch in run.batches(loader))
                for number, (images, classes) in enumerate(batches, 1):
                    loss = nn.functional.cross_entropy(model(images), classes)
                    backward(loss)
                    if number % accumulated:
                        continue
                    optimizer.step()
                    optimizer.zero_grad()
                    run.step(loss=loss, rate=scheduler.get_last_lr()[0])
                    scheduler.step()  # after the recorder has counted the step
                    if disturb is not None:
                        disturb(model, optimizer, run.global_step)
                    if run.global_step == stop:
                        states = [part.state_dict() for part in parts]
                        buffer = io.BytesIO()
                        torch.save({"parts": states, "run": run.state_dict()}, buffer)
                        if kept is None:
                            return buffer.getvalue()
                        kept.append(buffer.getvalue())
                for number, (images, _) in enumerate(
                    () if noise is None else run.validation(others)
                ):
                    model(images + noise * (number == 1 and epoch == 0))
                run.epoch(epoch, drawn=torch.rand(()).item())
    return run
