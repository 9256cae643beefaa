"""A classifier as one finds it in a tutorial."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)  # expect: D9M103
        self.norm = nn.BatchNorm2d(channels)  # fine
        self.edge = nn.Conv2d(channels, channels, 3, padding_mode="reflect")  # expect: D9M103
        self.zero = nn.Linear(channels, channels)  # fine

    def forward(self, x):
        y = F.relu(self.norm(self.conv(x)))  # fine
        return x + F.dropout(y, 0.1, self.training)  # fine


class Net(nn.Module):
    def __init__(self, pool_size=7):
        super().__init__()
        self.global_pool = nn.AdaptiveAvgPool2d(1)  # fine
        self.global_pair = nn.AdaptiveAvgPool2d((1, 1))  # fine
        self.grid_pool = nn.AdaptiveAvgPool2d((7, 7))  # expect: D9M101
        self.line_pool = nn.AdaptiveAvgPool1d(4)  # expect: D9M101
        self.any_pool = nn.AdaptiveAvgPool2d(pool_size)  # expect: D9M101
        self.volume_pool = nn.AdaptiveAvgPool3d(2)  # expect: D9M101
        self.volume_mean = nn.AdaptiveAvgPool3d((1, 1, 1))  # fine
        self.most = nn.AdaptiveMaxPool2d(3)  # expect: D9M101
        self.most3 = nn.AdaptiveMaxPool3d(3)  # expect: D9M102
        self.max_pool = nn.MaxPool2d(2)  # fine
        self.avg_pool = nn.AvgPool2d(2)  # fine
        self.avg_pool3 = nn.AvgPool3d(2)  # expect: D9M101
        self.max_pool3 = nn.MaxPool3d(2)  # expect: D9M103
        self.part = nn.FractionalMaxPool2d(2, output_size=3)  # expect: D9M101
        self.lstm = nn.LSTM(8, 8)  # expect: D9M103
        self.embed = nn.Embedding(10, 3)  # fine
        self.bag = nn.EmbeddingBag(10, 3, mode="max")  # expect: D9M101
        self.bag_sum = nn.EmbeddingBag(10, 3, mode="sum")  # fine
        self.bag_mean = nn.EmbeddingBag(10, 3)  # fine

    def forward(self, x):
        x = F.adaptive_avg_pool2d(x, (2, 3))  # expect: D9M101
        x = F.adaptive_avg_pool2d(x, 1)  # fine
        return torch.flatten(x, 1)  # fine

    def pick(self, x):
        return isinstance(self.grid_pool, nn.AdaptiveAvgPool2d)  # fine


def loss(x, y):
    a = nn.CrossEntropyLoss()(x, y)  # fine
    b = nn.NLLLoss()(x, y)  # expect: D9M101
    c = nn.NLLLoss(reduction="none")(x, y)  # fine
    d = nn.CTCLoss()(x, y, None, None)  # expect: D9M101
    return a + b + c + d
