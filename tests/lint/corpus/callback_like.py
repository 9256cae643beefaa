"""A training whose workers the callback seeds, on every rank."""

import lightning as L
from torch.utils.data import DataLoader

from lightning_d9m import DeterminismCallback

L.seed_everything(1)  # fine
loader = DataLoader(range(8), num_workers=2)  # fine
trainer = L.Trainer(callbacks=[DeterminismCallback()])  # fine
