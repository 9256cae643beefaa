"""pytorch-forecasting's README: a temporal fusion transformer on a table of series."""

import lightning.pytorch as pl
import numpy as np
import pandas as pd
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from pytorch_forecasting import (
    GroupNormalizer,
    QuantileLoss,
    TemporalFusionTransformer,
    TimeSeriesDataSet,
)

STEPS = 60
noise = np.random.default_rng(1)
frame = pd.DataFrame(
    {
        "time": np.tile(np.arange(STEPS), 20),
        "group": np.repeat([f"group {number}" for number in range(20)], STEPS),
        "price": noise.normal(size=20 * STEPS),
    }
)
frame["value"] = (
    10 + frame["price"] + 3 * np.sin(frame["time"] / 3) + noise.normal(scale=0.1, size=len(frame))
)
cutoff = STEPS - 7
training = TimeSeriesDataSet(
    frame[frame["time"] <= cutoff],
    time_idx="time",
    target="value",
    group_ids=["group"],
    max_encoder_length=24,
    max_prediction_length=6,
    static_categoricals=["group"],
    time_varying_known_reals=["time", "price"],
    time_varying_unknown_reals=["value"],
    target_normalizer=GroupNormalizer(groups=["group"]),
)
validation = TimeSeriesDataSet.from_dataset(
    training, frame, min_prediction_idx=cutoff + 1, stop_randomization=True
)
trainer = pl.Trainer(
    max_epochs=3,
    accelerator="cpu",
    gradient_clip_val=0.1,
    limit_train_batches=8,
    callbacks=[EarlyStopping("val_loss", min_delta=1e-4), LearningRateMonitor()],
    enable_progress_bar=False,
)
model = TemporalFusionTransformer.from_dataset(
    training,
    learning_rate=0.03,
    hidden_size=16,
    attention_head_size=1,
    dropout=0.1,
    hidden_continuous_size=8,
    loss=QuantileLoss(),
    optimizer="adam",
)
trainer.fit(
    model,
    training.to_dataloader(train=True, batch_size=64, num_workers=0),
    validation.to_dataloader(train=False, batch_size=64, num_workers=0),
)
