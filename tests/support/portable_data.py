"""A dataset for workers of any start method: a spawned one imports it from here."""

import torch
from torch.utils.data import Dataset

from lightning_d9m.ops.portability import is_portable


class Seen(Dataset):
    """The results of a worker: a sum whose bits torch decides, and a flag of the session."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        total = torch.tensor([0.1] * 1000 + [index]).sum().item()
        return total, torch.are_deterministic_algorithms_enabled(), is_portable()


def start_worker(number):
    """Do nothing: the function of a user."""
