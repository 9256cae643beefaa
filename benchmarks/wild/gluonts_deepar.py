"""gluonts' README: a DeepAR estimator, trained and used for forecasts."""

import numpy as np
import pandas as pd
from gluonts.dataset.pandas import PandasDataset
from gluonts.dataset.split import split
from gluonts.torch import DeepAREstimator

months = pd.date_range("1990-01", periods=240, freq="MS")
time = np.arange(len(months))
noise = np.random.default_rng(1).normal(size=len(months))
series = pd.DataFrame({"target": 100 + time + 20 * np.sin(time / 6 * np.pi) + noise}, index=months)
dataset = PandasDataset(series, target="target", freq="M")
training_data, test_gen = split(dataset, offset=-36)
predictor = DeepAREstimator(
    prediction_length=12,
    freq="M",
    num_batches_per_epoch=12,
    trainer_kwargs={"max_epochs": 4, "accelerator": "cpu", "enable_progress_bar": False},
).train(training_data)
test_data = test_gen.generate_instances(prediction_length=12, windows=3)
for forecast in predictor.predict(test_data.input):
    print(forecast.mean[:3])
