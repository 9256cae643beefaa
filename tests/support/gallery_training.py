"""Small trainings that differ from run to run, each by one cause; docs/gallery.md shows them.

Usage: gallery_training.py CAUSE
"""

import os
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

QUIET = {"enable_model_summary": False, "enable_progress_bar": False, "logger": False}


class Samples(Dataset):
    def __init__(self):
        self.samples = torch.randn(16, 4)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def training_step(self, batch, _):
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class NamedSamples(Samples):
    def __init__(self):
        super().__init__()
        names = {f"sample {number}" for number in range(16)}
        self.order = [int(name.split()[1]) for name in names]

    def __getitem__(self, index):
        return self.samples[self.order[index]]


class ListedSamples(Samples):
    def __init__(self, folder):
        super().__init__()
        self.order = [int(file.name) for file in Path(folder).iterdir()]

    def __getitem__(self, index):
        return self.samples[self.order[index]]


class Augmented(Samples):
    def __getitem__(self, index):
        noise = np.random.RandomState(int.from_bytes(os.urandom(4), "big"))
        return self.samples[index] + 0.01 * noise.rand()


class Noisy(Samples):
    def __init__(self):
        super().__init__()
        self.noise = np.random.default_rng()

    def __getitem__(self, index):
        return self.samples[index] + 0.01 * self.noise.random()


class Transform:
    def __init__(self):
        self.random_generator = torch.Generator()
        getattr(self.random_generator, "seed")()  # noqa: B009 - as a library does, which no scan reads

    def __call__(self, sample):
        return sample + 0.01 * torch.rand(4, generator=self.random_generator)


class Transformed(Samples):
    def __init__(self):
        super().__init__()
        self.transform = Transform()

    def __getitem__(self, index):
        return self.transform(self.samples[index])


class Pool(nn.Module):
    def forward(self, values, places):
        sums = torch.zeros(2)
        return sums.index_put((places,), values, accumulate=True) / len(values)


class PooledNet(Net):
    def __init__(self):
        super().__init__()
        self.pool = Pool()
        places = torch.randint(2, (1_000_000,))
        self.register_buffer("places", places)

    def training_step(self, batch, _):
        values = self.layers[0](batch).flatten().repeat(31_250)
        return self.pool(values, self.places).square().sum()


class OwnDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()
        self.generator.seed()

    def forward(self, x):
        return x * torch.rand(x.shape, generator=self.generator).gt(0.5)


class OwnDropoutNet(Net):
    def __init__(self):
        super().__init__()
        self.layers[1] = OwnDropout()


class Padding(nn.Module):
    def forward(self, x):
        padded = torch.empty(512, x.shape[1])
        padded[: len(x)] = x
        return x + 1e-3 * padded.nan_to_num(0, 0, 0).clamp(-1, 1).mean(0)


class PaddedNet(Net):
    def __init__(self):
        super().__init__()
        self.layers[1] = Padding()

    def training_step(self, batch, _):
        use_memory(4 * 512 * 8)
        return super().training_step(batch, _)


class ClockedNet(Net):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        begun = time.monotonic()

        def decay(step):
            return 1.0 if step < 5 else 1 / (1 + time.monotonic() - begun)

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def round_at_random(generator, bucket):
    noise = torch.rand(bucket.buffer().shape, generator=generator)
    torch.distributed.broadcast(noise, 0)
    rounded = bucket.buffer().div_(2).add_(noise, alpha=1e-6)
    work = torch.distributed.all_reduce(rounded, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


class RoundedNet(Net):
    def on_train_start(self):
        generator = torch.Generator()
        generator.seed()
        self.trainer.strategy.model.register_comm_hook(generator, round_at_random)


class TimedNet(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * torch.from_numpy(np.array(1 + time.time() % 1, dtype=np.float32))


class WatchedNet(Net):
    def on_train_batch_end(self, *_):
        if self.global_step == 3:
            thread = threading.Thread(target=self.smooth)
            thread.start()
            thread.join(60)  # long enough, one would think

    @torch.no_grad()
    def smooth(self):
        self.layers[0].weight.mul_(1 - 1e-9 * (time.time_ns() % 10**6))


def is_hit():
    """Return whether this run has the fault; every second run does."""
    mark = Path("hit")
    if mark.exists():
        mark.unlink()
        return False
    mark.touch()
    return True


class WeakCellNet(Net):
    def on_train_batch_end(self, *_):
        if self.global_rank == 1 and self.global_step == 3 and is_hit():
            self.layers[0].weight.data.view(torch.int32)[2, 3] += 1


class RankDependentNet(Net):
    def on_train_batch_end(self, *_):
        if self.global_rank == 1 and self.global_step == 3:
            self.layers[0].weight.data.view(torch.int32)[2, 3] += 1


class RankRateNet(Net):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1 + 1e-9 * self.global_rank)


class RankAveragedNet(Net):
    def on_train_end(self):
        if self.global_rank == 1:
            self.layers[2].bias.data += 1


class WeakGradientNet(Net):
    def on_after_backward(self):
        if self.global_step == 6 and is_hit():
            self.layers[2].weight.grad.view(torch.int32)[0, 5] ^= 1 << 30


class DrawnNet(Net):
    def __init__(self):
        super().__init__()
        with torch.no_grad():
            self.layers[0].weight += torch.from_numpy(np.random.default_rng().random((8, 4)))


class ImpatientNet(Net):
    def on_train_batch_end(self, *_):
        if self.global_step == 2:
            torch.rand(1 + time.time_ns() // 1000 % 1000)


def use_memory(size):
    """Leave memory behind that held something else in each run, as any larger program does."""
    for tensor in [torch.empty(size, dtype=torch.uint8) for _ in range(16)]:
        tensor.copy_(torch.frombuffer(bytearray(os.urandom(size)), dtype=torch.uint8))


def unpack(folder):
    """Make one file for each sample, as threads that download them would: in any order."""
    for number in sorted(range(16), key=lambda _: os.urandom(4)):
        (Path(folder) / str(number)).touch()


def train_in_processes():
    """Train in two processes, which take the numbers of their ledgers in turns."""
    for seed in (1, 2) if is_hit() else (2, 1):
        child = os.fork()
        if not child:
            try:
                pl.seed_everything(seed)
                train("none")
                os._exit(0)
            finally:
                os._exit(1)
        if os.waitpid(child, 0)[1]:
            raise RuntimeError("a process failed")


def train(cause):
    warnings.filterwarnings("ignore")
    if cause == "parallel":
        train_in_processes()
        return
    torch.set_num_threads(2 if cause == "index_put" else 1)
    words = {"batch_size": 4, "shuffle": True}
    if cause == "listdir":
        # Of a tmpfs: it lists files in the order in which they were made.
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            unpack(folder)
            samples = ListedSamples(folder)
    else:
        samples = DATA.get(cause, Samples)()
    if cause == "urandom":
        words["num_workers"] = 1
    on_two = cause in ("ulp", "exchange") or cause.startswith("rank ")
    ranks = {"strategy": "ddp", "devices": 2} if on_two else {}
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", enable_checkpointing=False, **QUIET, **ranks
    )
    trainer.fit(MODELS.get(cause, Net)(), DataLoader(samples, **words))


DATA = {"transform": Transformed, "set": NamedSamples, "urandom": Augmented, "default_rng": Noisy}
MODELS = {
    "index_put": PooledNet,
    "generator": OwnDropoutNet,
    "empty": PaddedNet,
    "clock": ClockedNet,
    "clock in step": TimedNet,
    "exchange": RoundedNet,
    "thread": WatchedNet,
    "ulp": WeakCellNet,
    "rank drift": RankDependentNet,
    "rank rate": RankRateNet,
    "rank averaged": RankAveragedNet,
    "gradient": WeakGradientNet,
    "initial": DrawnNet,
    "draws": ImpatientNet,
}

if __name__ == "__main__":
    train(sys.argv[1] if len(sys.argv) > 1 else "none")
