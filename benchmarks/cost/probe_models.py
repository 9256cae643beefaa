"""Models whose training steps are timed with and without probes."""

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Digits(pl.LightningModule):
    """A small convolutional net on 8 x 8 images, batch 64."""

    steps = 400
    block = 10
    batch_size = 64

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
            nn.Flatten(), nn.Linear(64 * 64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10),
        )  # fmt: skip

    @staticmethod
    def data() -> TensorDataset:
        """Return the samples of an epoch."""
        generator = torch.Generator().manual_seed(0)
        images = torch.rand(64 * Digits.steps, 1, 8, 8, generator=generator)
        return TensorDataset(images, torch.randint(10, (len(images),), generator=generator))

    def training_step(self, batch, _):
        """Return the loss."""
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Transformer(Digits):
    """An encoder of 10.5 million parameters, 8 sequences of 128 tokens."""

    steps = 120
    block = 3
    batch_size = 8

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(384, 6, 1536, batch_first=True, dropout=0.1)
        self.layers = nn.Sequential(
            nn.Embedding(2048, 384),
            nn.TransformerEncoder(layer, 5, enable_nested_tensor=False),
            nn.Linear(384, 2048),
        )

    @staticmethod
    def data() -> TensorDataset:
        """Return the samples of an epoch."""
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(2048, (8 * Transformer.steps, 128), generator=generator)
        return TensorDataset(tokens, tokens.roll(1, 1))

    def training_step(self, batch, _):
        """Return the loss."""
        logits = self.layers(batch[0])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        self.log("train_loss", loss)
        return loss


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut; the stride is in the middle one."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outputs))
        self.last = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the next block."""
        return self.last(self.body(x) + self.shortcut(x))


class ResNet50(Digits):
    """ResNet-50 (He et al. 2015, table 1), 25,557,032 parameters, 64 images of 224 x 224."""

    steps = 120
    block = 6
    batch_size = 64

    def __init__(self) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        inputs = 64
        for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for number in range(count):
                blocks.append(Bottleneck(inputs, width, 1 if number else stride))
                inputs = 4 * width
        self.layers = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
            nn.MaxPool2d(3, 2, 1), *blocks,
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000),
        )  # fmt: skip

    @staticmethod
    def data() -> TensorDataset:
        """Return the samples of an epoch: one image, of which each has a class of its own."""
        generator = torch.Generator().manual_seed(0)
        images = torch.rand(1, 3, 224, 224, generator=generator)
        classes = torch.randint(1000, (64 * ResNet50.steps,), generator=generator)
        return TensorDataset(images.expand(len(classes), -1, -1, -1), classes)


KINDS = {"Digits": Digits, "Transformer": Transformer, "ResNet50": ResNet50}
