"""Train a convolutional network on scikit-learn's 1,797 handwritten digits, bit-exactly.

Run it once:                     python examples/digits.py
Prove that it is bit-exact:      d9m repeat -n 2 -- python examples/digits.py
"""

import argparse

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_d9m import DeterminismCallback


class DigitsNet(L.LightningModule):
    """A small convolutional network with batch normalization and dropout."""

    def __init__(self, learning_rate: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(64 * 4 * 4, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """Return the cross-entropy of a batch: images (N, 1, 8, 8), classes (N,)."""
        images, classes = batch
        loss = nn.functional.cross_entropy(self.layers(images), classes)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        """Log loss and accuracy."""
        images, classes = batch
        logits = self.layers(images)
        self.log("val_loss", nn.functional.cross_entropy(logits, classes))
        self.log("val_accuracy", (logits.argmax(1) == classes).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> dict[str, object]:
        """Use AdamW with a cosine schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class Digits(L.LightningDataModule):
    """8x8 gray images of handwritten digits: 1,437 to train on, 360 to validate."""

    def __init__(self, batch_size: int = 64, num_workers: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        data = TensorDataset(images, torch.tensor(digits.target))
        # The split has a seed of its own: the same images in every run, whatever --seed says.
        self.training, self.validation = torch.utils.data.random_split(
            data, [1437, 360], torch.Generator().manual_seed(0)
        )

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Shuffle the training images."""
        return DataLoader(
            self.training,
            self.hparams["batch_size"],
            shuffle=True,
            num_workers=self.hparams["num_workers"],
        )

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Keep the validation images in order."""
        return DataLoader(self.validation, 360)


def main() -> None:
    """Train, and leave a ledger beside the logs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--accelerator", default="cpu", help="cpu, gpu or auto")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--workers", type=int, default=0)
    arguments = parser.parse_args()

    L.seed_everything(arguments.seed)  # before the model is built: its weights are random
    model = DigitsNet()
    trainer = L.Trainer(
        max_epochs=arguments.epochs,
        accelerator=arguments.accelerator,
        callbacks=[DeterminismCallback()],
        log_every_n_steps=10,
    )
    trainer.fit(model, Digits(num_workers=arguments.workers))
    print(f"validation accuracy: {trainer.callback_metrics['val_accuracy']:.4f}")


if __name__ == "__main__":
    main()
