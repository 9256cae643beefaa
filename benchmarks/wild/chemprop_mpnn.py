"""chemprop's notebook "training.ipynb": a message-passing network that predicts a property."""

import numpy as np
from chemprop import data, featurizers, models, nn
from lightning import pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

GROUPS = ("O", "N", "F", "Cl", "C#N", "C(=O)O", "c1ccccc1", "C1CCC1")


def make_molecules() -> list[data.MoleculeDatapoint]:
    """Return chains of carbon that end in a group, with a target that depends on both."""
    return [
        data.MoleculeDatapoint.from_smi(
            "C" * length + group, np.array([0.3 * length + number**0.5])
        )
        for length in range(1, 33)
        for number, group in enumerate(GROUPS)
    ]


points = make_molecules()
parts = data.make_split_indices([point.mol for point in points], "random", (0.8, 0.1, 0.1))
train, val, test = data.split_data_by_indices(points, *parts)
featurizer = featurizers.SimpleMoleculeMolGraphFeaturizer()
train_set = data.MoleculeDataset(train[0], featurizer)
scaler = train_set.normalize_targets()
val_set = data.MoleculeDataset(val[0], featurizer)
val_set.normalize_targets(scaler)
test_set = data.MoleculeDataset(test[0], featurizer)

model = models.MPNN(
    nn.BondMessagePassing(),
    nn.MeanAggregation(),
    nn.RegressionFFN(output_transform=nn.UnscaleTransform.from_standard_scaler(scaler)),
    batch_norm=True,
    metrics=[nn.metrics.RMSE(), nn.metrics.MAE()],
)
trainer = pl.Trainer(
    logger=False,
    accelerator="cpu",
    max_epochs=6,
    callbacks=[ModelCheckpoint("checkpoints", "best-{epoch}", "val_loss", save_last=True)],
    enable_progress_bar=False,
)
trainer.fit(
    model,
    data.build_dataloader(train_set, num_workers=0),
    data.build_dataloader(val_set, num_workers=0, shuffle=False),
)
trainer.test(model, data.build_dataloader(test_set, num_workers=0, shuffle=False))
