"""Seeds (none, fixed, and from the clock), flags of torch and Lightning, and loaders."""

import os
import random
import secrets
import time
import uuid
from datetime import datetime
from random import Random

import lightning as L
import numpy as np
import numpy.random as npr
import pytorch_lightning as pl
import torch
import torch.backends.cudnn as cudnn
from numpy.random import RandomState, default_rng
from torch import nn
from torch.utils.data import DataLoader, Dataset

CONFIG = {"seed": 3}
SEED = 42

unseeded = default_rng()  # expect: D9M201
legacy = RandomState()  # expect: D9M201
python = Random()  # expect: D9M201
sequence = np.random.SeedSequence()  # expect: D9M201
system = random.SystemRandom(3).sample(range(9), 3)  # expect: D9M201
seeded = default_rng(0)  # fine
configured = np.random.default_rng(CONFIG["seed"])  # fine
named = npr.default_rng(seed=SEED)  # fine
fixed = RandomState(SEED)  # fine
twister = random.Random(7)  # fine

random.seed(0)  # fine
np.random.seed(None)  # expect: D9M204
np.random.seed(SEED)  # fine
torch.manual_seed(SEED)  # fine
torch.cuda.manual_seed_all(SEED)  # fine
torch.manual_seed(int(time.time()))  # expect: D9M203
np.random.seed(int.from_bytes(os.urandom(4), "little"))  # expect: D9M203
random.seed(uuid.uuid4().int)  # expect: D9M203
clock = int(datetime.now().timestamp())
torch.manual_seed(clock)  # expect: D9M203
by_process = np.random.default_rng(os.getpid())  # expect: D9M203
started = time.time()  # fine
run_name = uuid.uuid4().hex  # fine
token = os.urandom(8)  # fine
lucky = secrets.choice([1, 2, 3])  # fine
state = default_rng()  # fine
state.bit_generator.state = configured.bit_generator.state

def fit(model, seed=None):
    return model.fit(random_state=int(time.time()))  # expect: D9M203


def fit_fixed(model, seed=None):
    return model.fit(random_state=seed)  # fine


class Shuffler:
    def __init__(self):
        self.later = random.Random()  # fine
        self.never = random.Random()  # expect: D9M201

    def start(self, seed):
        self.later.seed(seed)  # fine


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


cudnn.benchmark = True  # expect: D9M401
cudnn.benchmark = False  # fine
torch.backends.cudnn.benchmark = True  # expect: D9M401
torch.backends.cudnn.deterministic = False  # expect: D9M402
torch.backends.cudnn.enabled = True  # fine
torch.use_deterministic_algorithms(False)  # expect: D9M402
torch.use_deterministic_algorithms(True, warn_only=True)  # expect: D9M402
torch.set_deterministic_debug_mode("warn")  # expect: D9M402

trainer = L.Trainer(max_epochs=1, benchmark=True)  # expect: D9M401
quick = pl.Trainer(benchmark=False)  # fine
warned = pl.Trainer(deterministic="warn")  # expect: D9M402
loose = L.Trainer(deterministic=False)  # expect: D9M402


class Trainer:
    def __init__(self, benchmark):
        self.benchmark = benchmark


mine = Trainer(benchmark=True)  # fine
tuned = torch.compile(nn.Linear(1, 1), mode="max-autotune")  # expect: D9M106
compiled = torch.compile(nn.Linear(1, 1))  # fine


def seed_all_alike(worker_id):
    np.random.seed(0)  # expect: D9M207


def seed_apart(worker_id):
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)  # fine
    random.seed(seed)  # fine


def say_hello(worker_id):
    print(worker_id)  # fine


class Legacy(Dataset):
    def __getitem__(self, index):
        # torch seeds NumPy in each worker.
        return np.random.rand()  # fine


a = DataLoader(Legacy(), num_workers=2, worker_init_fn=seed_all_alike)
b = DataLoader(Legacy(), num_workers=2, worker_init_fn=seed_apart)
c = DataLoader(Legacy(), num_workers=2, worker_init_fn=say_hello)  # fine
d = DataLoader(Legacy(), num_workers=2, in_order=False)  # expect: D9M305
e = DataLoader(Legacy(), num_workers=2)  # fine
