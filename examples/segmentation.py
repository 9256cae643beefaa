"""Train a small segmentation network that torch refuses to train deterministically on a GPU.

It interpolates (bilinear and bicubic), pools adaptively, pads by reflection and takes the 2-D
negative log likelihood. With deterministic algorithms on, torch raises at most of these on CUDA;
the callback replaces them (patch_ops, on by default there). The data are scikit-learn's handwritten
digits, scattered over larger images; the masks name the digit that a pixel belongs to.

Run it once:                     python examples/segmentation.py
Prove that it is bit-exact:      d9m repeat -n 2 -- python examples/segmentation.py
"""

import argparse

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_d9m import DeterminismCallback

_CLASSES = 11  # ten digits and the background
_SIDE, _DIGIT = 32, 8


class SegmentationNet(L.LightningModule):
    """Encoder, gate from adaptively pooled features, decoder that interpolates twice."""

    def __init__(self, width: int = 16, learning_rate: float = 5e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        # Most pixels are background; it counts a tenth.
        self.register_buffer("weights", torch.tensor([1.0] * (_CLASSES - 1) + [0.1]))
        self.enter = nn.Conv2d(1, width, 3, padding=1, padding_mode="reflect")
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, padding_mode="reflect")
        self.deep = nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=1, padding_mode="reflect")
        self.gate = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up = nn.Conv2d(4 * width, width, 3, padding=1, padding_mode="reflect")
        self.leave = nn.Conv2d(2 * width, _CLASSES, 3, padding=1, padding_mode="reflect")

    def forward(self, images: Tensor) -> Tensor:
        """Return log probabilities of shape (N, classes, H, W) for images (N, 1, H, W)."""
        fine = functional.relu(self.enter(images))
        middle = functional.relu(self.down(fine))
        coarse = functional.relu(self.deep(middle))
        # Means and maxima over a 3 x 3 grid, whose cells overlap in an 8 x 8 map.
        scene = functional.adaptive_avg_pool2d(coarse, 3) + functional.adaptive_max_pool2d(
            coarse, 3
        )
        gate = functional.interpolate(self.gate(scene), size=coarse.shape[-2:], mode="bilinear")
        raised = functional.interpolate(coarse * gate.sigmoid(), scale_factor=2, mode="bicubic")
        raised = functional.relu(self.up(torch.cat([raised, middle], dim=1)))
        raised = functional.interpolate(raised, scale_factor=2, mode="bilinear")
        return self.leave(torch.cat([raised, fine], dim=1)).log_softmax(1)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """Return the negative log likelihood of masks (N, H, W)."""
        images, masks = batch
        loss = functional.nll_loss(self(images), masks, self.weights)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        """Log the loss and the share of the digits' pixels that are named right."""
        images, masks = batch
        scores = self(images)
        self.log("val_loss", functional.nll_loss(scores, masks, self.weights))
        drawn = masks < _CLASSES - 1
        right = (scores.argmax(1) == masks)[drawn].float().mean()
        self.log("val_accuracy", right, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Use AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])


def make_scenes(count: int, seed: int) -> TensorDataset:
    """Scatter four digits over each of some images; their pixels are the mask.

    Args:
        count: How many images.
        seed: Not the training's: the same scenes in every run.

    Returns:
        Images of shape (count, 1, 32, 32) in 0..1, and masks (count, 32, 32) of classes.
    """
    digits = load_digits()
    drawings = torch.tensor(digits.images, dtype=torch.float32) / 16
    names = torch.tensor(digits.target)
    draws = torch.Generator().manual_seed(seed)
    images = torch.zeros(count, 1, _SIDE, _SIDE)
    masks = torch.full((count, _SIDE, _SIDE), _CLASSES - 1)
    chosen = torch.randint(len(drawings), (count, 2, 2), generator=draws).tolist()
    shifts = torch.randint(_SIDE // 2 - _DIGIT + 1, (count, 2, 2, 2), generator=draws).tolist()
    for scene in range(count):
        for cell in ((0, 0), (0, 1), (1, 0), (1, 1)):
            which = chosen[scene][cell[0]][cell[1]]
            top, left = (
                place * _SIDE // 2 + shift
                for place, shift in zip(cell, shifts[scene][cell[0]][cell[1]], strict=True)
            )
            there = (scene, slice(top, top + _DIGIT), slice(left, left + _DIGIT))
            images[:, 0][there] = drawings[which]
            masks[there] = torch.where(drawings[which] > 0, names[which], _CLASSES - 1)
    return TensorDataset(images, masks)


def main() -> None:
    """Train, and leave a ledger beside the logs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--scenes", type=int, default=512)
    parser.add_argument("--accelerator", default="auto", help="cpu, gpu or auto")
    parser.add_argument("--devices", type=int, default=1, help="more than one: with DDP")
    arguments = parser.parse_args()

    L.seed_everything(arguments.seed)  # before the model is built: its weights are random
    model = SegmentationNet()
    trainer = L.Trainer(
        max_epochs=arguments.epochs,
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        callbacks=[DeterminismCallback()],
        log_every_n_steps=10,
    )
    trainer.fit(
        model,
        DataLoader(make_scenes(arguments.scenes, seed=0), 32, shuffle=True),
        DataLoader(make_scenes(64, seed=1), 64),
    )
    print(f"validation accuracy: {trainer.callback_metrics['val_accuracy']:.4f}")


if __name__ == "__main__":
    main()
