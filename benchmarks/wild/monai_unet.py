"""A U-Net of MONAI, on its random transforms."""

import lightning as L
import numpy as np
import torch
from monai.data import DataLoader, Dataset
from monai.networks.nets import UNet
from monai.transforms import Compose, RandFlipd, RandGaussianNoised, RandRotate90d, ToTensord


class Net(L.LightningModule):
    """Maps images of noise to others."""

    def __init__(self):
        super().__init__()
        self.net = UNet(2, 1, 1, (4, 8), (2,))

    def training_step(self, batch, _):
        """Compute the loss."""
        loss = torch.nn.functional.mse_loss(self.net(batch["image"]), batch["label"])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters(), 0.01)


def main():
    """Train for two epochs."""
    both = ["image", "label"]
    rng = np.random.default_rng(0)
    rows = [
        {key: rng.normal(size=(1, 16, 16)).astype("float32") for key in both} for _ in range(12)
    ]
    transforms = Compose(
        [
            RandFlipd(both, prob=0.5),
            RandRotate90d(both, prob=0.5),
            RandGaussianNoised("image", prob=0.7),
            ToTensord(both),
        ]
    )
    loader = DataLoader(Dataset(rows, transforms), batch_size=2, shuffle=True, num_workers=2)
    trainer = L.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False)
    trainer.fit(Net(), loader)


if __name__ == "__main__":
    main()
