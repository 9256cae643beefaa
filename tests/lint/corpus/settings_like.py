"""Flags of torch and Lightning, and loaders."""

import lightning as L
import pytorch_lightning as pl
import random
import torch
import torch.backends.cudnn as cudnn
from torch import nn
import numpy as np
from torch.utils.data import DataLoader, Dataset

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
