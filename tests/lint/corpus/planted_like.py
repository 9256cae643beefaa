"""Causes that were planted in trainings, and innocent code that resembles them."""

import os
import threading
import time
from datetime import datetime
from os.path import getmtime
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR


class Shards:
    def __init__(self, root: Path):
        self.paths = sorted(root.glob("*.pt"), key=os.path.getmtime)  # expect: D9M306
        self.newest_first = sorted(  # expect: D9M306
            root.glob("*.pt"),
            key=lambda path: path.stat().st_mtime,
            reverse=True,
        )
        self.logs = list(sorted(root.glob("*.log"), key=lambda path: path.name))  # fine
        self.checkpoints = list(sorted(root.glob("*.ckpt")))  # fine
        self.parts = [*sorted(root.glob("*"))]  # fine
        self.parts.sort(key=getmtime)  # expect: D9M306

    def __getitem__(self, index):
        return self.paths[index], self.newest_first[index]

    def __iter__(self):
        yield from self.parts


def find_checkpoint(folder):
    files = [os.path.join(folder, name) for name in sorted(os.listdir(folder))]
    latest = max(files, key=os.path.getmtime)  # fine
    newest = sorted(files, key=os.path.getmtime)[-1]  # fine
    by_age = sorted(files, key=lambda name: os.stat(name).st_mtime)  # fine
    oldest = by_age[0]
    kept = by_age[-3:]
    files.sort(key=os.path.getmtime)  # fine
    for path in sorted(Path(folder).glob("*.ckpt"), key=getmtime)[:-3]:  # fine
        path.unlink()
    for path in sorted(Path(folder).glob("*.tmp"), key=getmtime):  # fine
        print(path)
    return latest, newest, oldest, kept, files[-1]


def read_newest(folder, count):
    recent = sorted(Path(folder).glob("*.pt"), key=getmtime)  # expect: D9M306
    return [torch.load(path) for path in recent], recent[count]


class Sampler:
    def __init__(self, size, env):
        self.generator = torch.Generator()
        self.generator.seed()  # expect: D9M204
        self.fixed = torch.Generator()
        self.fixed.manual_seed(size)  # fine
        self.env = env
        self.env.seed()  # fine

    def draw(self, size):
        noise = torch.Generator()
        noise.seed()  # expect: D9M204
        return torch.randperm(size, generator=noise), torch.Generator().seed()  # expect: D9M204

    def seed(self):
        return self.fixed.initial_seed()


def decay(optimizer, base, limit, batches, step):
    start = time.time()
    for _ in batches:
        elapsed = time.time() - start
        for group in optimizer.param_groups:
            group["lr"] = base * max(0.0, 1 - elapsed / limit)  # expect: D9M212
            group["elapsed"] = elapsed  # fine
            group["lr"] *= time.monotonic() / limit  # expect: D9M212
            group["lr"] = base * 0.9**step  # fine
        print({"lr": base, "elapsed": elapsed, "seconds": time.time() - start})  # fine
        print(dict(lr=base, seconds=time.perf_counter() - start))  # fine


def by_hour(epoch):
    return 1.0 if datetime.now().hour < 12 else 0.5


def by_epoch(epoch):
    print(time.time())
    return 0.9**epoch


def schedule(model, optimizer):
    first = LambdaLR(optimizer, by_hour)  # expect: D9M212
    second = LambdaLR(optimizer, lr_lambda=lambda epoch: 1 / time.time())  # expect: D9M212
    third = LambdaLR(optimizer, by_epoch)  # fine
    fourth = torch.optim.SGD(model.parameters(), lr=time.time() % 1)  # expect: D9M212
    fifth = torch.optim.SGD(model.parameters(), lr=0.1)  # fine
    return first, second, third, fourth, fifth


def shift(values):
    shifted = torch.empty(8)  # expect: D9M107
    shifted[1:] = values
    return shifted * 2


def halves(values, size):
    padded = torch.empty(size, size)  # expect: D9M107
    padded[:, :-1] = values
    return torch.relu(padded)


def every_other(values):
    mixed = torch.empty_like(values)  # expect: D9M107
    mixed[::2] = values[::2]
    return mixed


def interleave(values, others):
    both = torch.empty(8)  # fine
    both[::2] = values
    both[1::2] = others
    return both + 1


def fill_up(values, count):
    filled = torch.empty(8)  # fine
    filled[:count] = values
    filled[count:] = 0
    return filled


def fill_rest(values):
    rest = torch.empty(8)  # fine
    rest[1:] = values
    rest[0].zero_()
    return rest.sum()


def fill_in_loop(rows):
    matrix = torch.empty(len(rows), 3)  # fine
    for number, row in enumerate(rows):
        matrix[number] = row
    return matrix.mean()


def read_written_part(values):
    buffer = torch.empty(8)  # fine
    buffer[1:] = values
    return buffer[1:].sum()


def fill_elsewhere(values, fill):
    given = torch.empty(8)  # fine
    given[1:] = values
    fill(given)
    return given + 1


class Averager:
    def __init__(self, model, shadow, optimizer):
        self.model, self.shadow, self.optimizer = model, shadow, optimizer

    def start(self):
        threading.Thread(target=self.perturb, daemon=True).start()  # expect: D9M307
        threading.Timer(1.0, self.train).start()  # expect: D9M307
        threading.Thread(target=self.average).start()  # fine
        threading.Thread(target=self.log, daemon=True).start()  # fine
        waited = threading.Thread(target=self.perturb)  # fine
        waited.start()
        waited.join()

    def perturb(self):
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.data.mul_(0.999)

    def train(self):
        self.optimizer.step()

    def average(self):
        for kept, parameter in zip(self.shadow, self.model.parameters()):
            kept.mul_(0.9).add_(parameter.detach(), alpha=0.1)

    def log(self):
        for name, parameter in self.model.named_parameters():
            print(name, float(parameter.norm()))


def start_decay(model):
    def decay_weights():
        for _, weight in model.named_parameters():
            weight.data -= 0.01 * weight.data

    thread = threading.Thread(target=decay_weights)  # expect: D9M307
    thread.start()
    return thread
