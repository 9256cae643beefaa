"""Train with a Learner of fastai and its own Adam, which is not an optimizer of torch."""

import torch
from fastai.basics import CrossEntropyLossFlat, DataLoaders, accuracy
from fastai.callback.schedule import Learner  # with fit_one_cycle
from sklearn.datasets import load_digits
from torch import nn

d = load_digits()
images = torch.tensor(d.data, dtype=torch.float32) / 16
rows = list(zip(images, torch.tensor(d.target), strict=True))
loaders = DataLoaders.from_dsets(rows[:1500], rows[1500:], bs=32, num_workers=0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 10))
learner = Learner(loaders, model, loss_func=CrossEntropyLossFlat(), metrics=accuracy)
learner.fit_one_cycle(2)
