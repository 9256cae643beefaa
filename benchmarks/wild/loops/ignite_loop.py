"""Train with an engine of pytorch-ignite."""

import torch
from ignite.engine import create_supervised_trainer
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

d = load_digits()
data = TensorDataset(torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target))
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters())
trainer = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss())
trainer.run(DataLoader(data, batch_size=32, shuffle=True), max_epochs=3)
