"""Train with the same bits on any number of processes from 1 to 4.

Run it on one process:    python examples/logical_ranks.py
Run it on two:            torchrun --nproc-per-node 2 examples/logical_ranks.py
Compare several numbers:  d9m repeat --processes 1,2,4 -- python examples/logical_ranks.py
"""

import os

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_d9m import DDPDeterministicStrategy, DeterminismCallback


class DigitsNet(L.LightningModule):
    """A small network with batch normalization and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10)
        )

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """Return the cross-entropy of a micro-batch: images (N, 64), classes (N,)."""
        images, classes = batch
        loss = nn.functional.cross_entropy(self.layers(images), classes)
        self.log("train_loss", loss, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Use AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main() -> None:
    """Train for two epochs."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy=DDPDeterministicStrategy(logical_ranks=4),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[DeterminismCallback()],
    )
    # 16 samples for each logical rank: 64 in each step, on any number of processes.
    trainer.fit(DigitsNet(), DataLoader(data, batch_size=16, shuffle=True))


if __name__ == "__main__":
    main()
