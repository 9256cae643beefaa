"""A seeded training whose runs differ nevertheless: a generator of its own has no seed.

See that the runs differ:   d9m repeat -n 2 -- python examples/noisy_digits.py
Find the line:              d9m locate -- python examples/noisy_digits.py
"""

import lightning as L
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class NoisyDigits(Dataset[tuple[Tensor, Tensor]]):
    """Digits as vectors of 64 values, with Gaussian noise as augmentation."""

    def __init__(self) -> None:
        digits = load_digits()
        self.images = torch.tensor(digits.data / 16, dtype=torch.float32)
        self.classes = torch.tensor(digits.target)
        self.noise = np.random.default_rng()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.from_numpy(self.noise.normal(0, 0.1, 64).astype(np.float32))
        return self.images[index] + noise, self.classes[index]


class Classifier(L.LightningModule):
    """A network with one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """Return the cross-entropy of a batch: images (N, 64), classes (N,)."""
        images, classes = batch
        return nn.functional.cross_entropy(self.layers(images), classes)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Use AdamW."""
        return torch.optim.AdamW(self.parameters())


def main() -> None:
    """Train for one epoch."""
    L.seed_everything(42)
    trainer = L.Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(Classifier(), DataLoader(NoisyDigits(), 64, shuffle=True))


if __name__ == "__main__":
    main()
