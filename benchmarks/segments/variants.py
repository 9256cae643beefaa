"""Trainings that differ in one thing, for checks.py: python variants.py NAME."""

import sys

import lightning as L
import torch
from lightning.pytorch import callbacks
from torch import nn, optim
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

SHAPE, CLASSES, COUNT = (1, 8, 8), 4, 96


class Recurrent(nn.Module):
    """An LSTM over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, 2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        """Return the logits."""
        return self.head(self.lstm(x[:, 0])[0][:, -1])


class Attention(nn.Module):
    """A layer of a transformer over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        """Return the logits."""
        return self.head(self.layer(x[:, 0]).mean(1))


def convolutional():
    """Return a small convolutional network."""
    first = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2))
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(144, CLASSES))


def timm_model(name="mobilenetv3_small_050"):
    """Return a model of timm."""
    import timm

    return timm.create_model(name, in_chans=1, num_classes=CLASSES, drop_rate=0.1)


def smp_model():
    """Return the encoder of a segmentation network with a pooled output."""
    import segmentation_models_pytorch as smp

    net = smp.Unet("resnet18", encoder_weights=None, in_channels=1, classes=CLASSES)
    return nn.Sequential(nn.Upsample(32), net, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def monai_model():
    """Return a network of MONAI."""
    from monai.networks.nets import DenseNet

    return DenseNet(2, 1, CLASSES, 8, 4, (2, 2), dropout_prob=0.1)


def one_cycle(optimizer):
    """Return a schedule by steps."""
    return {"scheduler": optim.lr_scheduler.OneCycleLR(optimizer, 0.01, 36), "interval": "step"}


def plateau(optimizer):
    """Return a schedule that looks at a metric."""
    return {"scheduler": optim.lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": "val_loss"}


def timm_schedule(optimizer):
    """Return the cosine of timm's optimizers, with a warmup."""
    warm = optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=1)
    return optim.lr_scheduler.ChainedScheduler(
        [warm, optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)]
    )


class Stream(IterableDataset):
    """A stream of the data."""

    def __init__(self, data) -> None:
        self.data = data

    def __iter__(self):
        return iter(self.data[number] for number in range(len(self.data)))


# The model, the optimizer, the schedule, options of the loader, and options of the Trainer.
VARIANTS = {
    "plain": {},
    "lstm": {"model": Recurrent},
    "attention": {"model": Attention},
    "timm": {"model": timm_model},
    "timm resnet": {"model": lambda: timm_model("resnet10t"), "schedule": timm_schedule},
    "segmentation models": {"model": smp_model},
    "monai densenet": {"model": monai_model},
    "torchmetrics": {"metric": True},
    "bfloat16": {"trainer": {"precision": "bf16-mixed"}},
    "float64": {"trainer": {"precision": "64-true"}},
    "two workers": {"loader": {"num_workers": 2}},
    "persistent workers": {"loader": {"num_workers": 2, "persistent_workers": True}},
    "weighted sampler": {"sampler": True},
    "stream": {"stream": True},
    "drop last": {"loader": {"batch_size": 20, "drop_last": True}},
    "momentum": {"optimizer": lambda p: optim.SGD(p, 0.01, momentum=0.9, nesterov=True)},
    "amsgrad": {"optimizer": lambda p: optim.AdamW(p, 1e-3, amsgrad=True)},
    "lbfgs": {"optimizer": lambda p: optim.LBFGS(p, 0.1, max_iter=3)},
    "one cycle": {"schedule": one_cycle},
    "plateau": {"schedule": plateau},
    "clipped by value": {
        "trainer": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}
    },
    "accumulated": {"trainer": {"accumulate_grad_batches": 2}},
    "accumulating later": {"callbacks": lambda: [callbacks.GradientAccumulationScheduler({1: 2})]},
    "averaged weights": {"callbacks": lambda: [callbacks.EMAWeightAveraging(decay=0.9)]},
    "stochastic averaging": {
        "callbacks": lambda: [callbacks.StochasticWeightAveraging(1e-3, swa_epoch_start=1)]
    },
    "early stopping": {"callbacks": lambda: [callbacks.EarlyStopping("val_loss", patience=1)]},
    "validation within": {"trainer": {"val_check_interval": 0.5}},
    "by steps": {"trainer": {"max_steps": 15}, "saving": {"every_n_train_steps": 4}},
    "last alone": {"saving": {"save_top_k": 1, "save_last": True}},
    "weights alone": {"saving": {"save_weights_only": True}},
    "limited": {"trainer": {"limit_train_batches": 0.5, "limit_val_batches": 1}},
    "logged": {"trainer": {"logger": True}},
    "adversarial": {"two": True},
}  # fmt: skip
NAME = sys.argv[1] if __name__ == "__main__" else "plain"
CHANGES = VARIANTS[NAME]


class Net(L.LightningModule):
    """A classifier, with the changes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = CHANGES.get("model", convolutional)()
        if "metric" in CHANGES:
            from torchmetrics import Accuracy, MetricCollection
            from torchmetrics.classification import MulticlassAUROC

            own = {"accuracy": Accuracy("multiclass", num_classes=CLASSES)}
            self.metric = MetricCollection({**own, "auroc": MulticlassAUROC(CLASSES)})
        self.automatic_optimization = "two" not in CHANGES

    def training_step(self, batch, _):
        """Return the loss of a batch, or step with each optimizer in turn."""
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        if self.automatic_optimization:
            return loss
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(nn.functional.cross_entropy(self.net(x), y))
            optimizer.step()
        return None

    def validation_step(self, batch, _):
        """Log the loss, and the metrics if they are wanted."""
        logits = self.net(batch[0])
        self.log("val_loss", nn.functional.cross_entropy(logits, batch[1]))
        if "metric" in CHANGES:
            self.metric.update(logits.softmax(1), batch[1])

    def on_validation_epoch_end(self):
        """Log the metrics."""
        if "metric" in CHANGES:
            self.log_dict(self.metric.compute())
            self.metric.reset()

    def configure_optimizers(self):
        """Return the optimizers and schedules."""
        if "two" in CHANGES:
            *first, last = self.net
            parts = [nn.Sequential(*first), last]
            return [optim.Adam(part.parameters(), 1e-3) for part in parts]
        make = CHANGES.get("optimizer", lambda own: optim.Adam(own, 1e-3))
        optimizer = make(self.parameters())
        found = {"optimizer": optimizer}
        if "schedule" in CHANGES:
            found["lr_scheduler"] = CHANGES["schedule"](optimizer)
        return found


def main():
    """Train for three epochs."""
    L.seed_everything(1)
    double = CHANGES.get("trainer", {}).get("precision") == "64-true"
    x = torch.randn(COUNT, *SHAPE, dtype=torch.float64 if double else torch.float32)
    data = TensorDataset(x, torch.randint(CLASSES, (COUNT,)))
    sampled = {"sampler": WeightedRandomSampler(torch.arange(1.0, COUNT + 1), COUNT)}
    how = sampled if "sampler" in CHANGES else {"shuffle": "stream" not in CHANGES}
    options = {"batch_size": 8, **how, **CHANGES.get("loader", {})}
    loader = DataLoader(Stream(data) if "stream" in CHANGES else data, **options)
    saving = {"save_top_k": -1, **CHANGES.get("saving", {})}
    others = CHANGES.get("callbacks", list)()
    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    given = {**off, "max_epochs": 3, "accelerator": "cpu", **CHANGES.get("trainer", {})}
    saver = callbacks.ModelCheckpoint("saved", "{epoch}-{step}", **saving)
    trainer = L.Trainer(callbacks=[saver, *others], **given)
    trainer.fit(Net(), loader, DataLoader(data, 32))


if __name__ == "__main__":
    main()
