"""Ops under many names: layers of a classifier, upsampling, indexing, and what only looks like it."""

import asyncio
import functools

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import torch.nn.functional
import torch.nn.functional as F
import torchvision
import triton
import triton.language as tl
from flash_attn import flash_attn_func
from mamba_ssm import Mamba, Mamba2
from torch import gather as pick
from torch import nn
from torch.nn import functional as fn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import grid_sample, interpolate as up, pad
from torch.nn.modules.upsampling import Upsample
from torch_scatter import scatter_max, segment_csr
from torchvision.ops import DeformConv2d

MODE = "nearest"
SMOOTH = "bilinear"
resize = torch.nn.functional.interpolate
half = functools.partial(fn.interpolate, scale_factor=0.5, mode="bicubic")  # expect: D9M101
keep = functools.partial(fn.interpolate, scale_factor=0.5)  # fine


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Upsample(scale_factor=2)  # fine
        self.smooth = Upsample(scale_factor=2, mode="bilinear")  # expect: D9M103
        self.line = nn.Upsample(None, 2, "linear")  # expect: D9M101
        self.old = nn.UpsamplingBilinear2d(scale_factor=2)  # expect: D9M103
        self.reflect = nn.ReflectionPad2d(1)  # expect: D9M103
        self.unpool = nn.MaxUnpool2d(2)  # expect: D9M101

    def forward(self, x, size, mode):
        x = up(x, size)  # fine
        x = up(x, size, mode="nearest")  # fine
        x = up(x, size, mode="nearest-exact")  # fine
        x = up(x, size, mode=MODE)  # fine
        x = up(x, size, mode="bilinear", align_corners=False)  # expect: D9M103
        x = up(x, size, None, "trilinear")  # expect: D9M103
        x = up(x, size, mode=SMOOTH)  # expect: D9M103
        x = up(x, size, mode=mode)  # expect: D9M103
        x = resize(x, size, mode="bicubic")  # expect: D9M101
        x = resize(x, size, mode="area")  # expect: D9M101
        x = fn.interpolate(x, size, mode="bilinear", antialias=True)  # expect: D9M101
        x = fn.interpolate(x, size, mode="bicubic", antialias=True)  # expect: D9M101
        x = pad(x, (1, 1, 1, 1), mode="reflect")  # expect: D9M103
        x = pad(x, (1, 1), mode="circular")  # fine
        x = pad(x, (1, 1))  # fine
        x = fn.pad(x, (1, 1), "replicate")  # expect: D9M103
        return grid_sample(x, size)  # expect: D9M101

    @torch.no_grad()
    def preview(self, x):
        return up(x, scale_factor=2, mode="bicubic")  # fine

    def measure(self, x):
        with torch.inference_mode():
            y = fn.grid_sample(x, x)  # fine
        with torch.enable_grad():
            return y + fn.grid_sample(x, x)  # expect: D9M101

    def interpolate(self, a, b):
        return a + b  # fine

    def blend(self, a, b):
        return self.interpolate(a, b)  # fine


def interpolate(a, b, mode="bilinear"):
    return (a + b) / 2  # fine


mixed = interpolate(1, 2, mode="bilinear")  # fine


def build(grid_sample):
    from torch.nn.functional import avg_pool3d as pool

    return grid_sample(1, 2)  # fine
    return pool(1, 2)  # expect: D9M101


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)  # expect: D9M103
        self.edge = nn.Conv2d(channels, channels, 3, padding_mode="reflect")  # expect: D9M103


class Net(nn.Module):
    def __init__(self, pool_size=7):
        super().__init__()
        self.global_pool = nn.AdaptiveAvgPool2d(1)  # fine
        self.grid_pool = nn.AdaptiveAvgPool2d((7, 7))  # expect: D9M101
        self.line_pool = nn.AdaptiveAvgPool1d(4)  # expect: D9M101
        self.any_pool = nn.AdaptiveAvgPool2d(pool_size)  # expect: D9M101
        self.volume_pool = nn.AdaptiveAvgPool3d(2)  # expect: D9M101
        self.volume_mean = nn.AdaptiveAvgPool3d((1, 1, 1))  # fine
        self.most = nn.AdaptiveMaxPool2d(3)  # expect: D9M101
        self.most3 = nn.AdaptiveMaxPool3d(3)  # expect: D9M102
        self.avg_pool3 = nn.AvgPool3d(2)  # expect: D9M101
        self.max_pool3 = nn.MaxPool3d(2)  # expect: D9M103
        self.part = nn.FractionalMaxPool2d(2, output_size=3)  # expect: D9M101
        self.lstm = nn.LSTM(8, 8)  # expect: D9M103
        self.embed = nn.Embedding(10, 3)  # fine
        self.bag = nn.EmbeddingBag(10, 3, mode="max")  # expect: D9M101
        self.bag_sum = nn.EmbeddingBag(10, 3, mode="sum")  # fine

    def forward(self, x):
        x = F.adaptive_avg_pool2d(x, (2, 3))  # expect: D9M101
        x = F.adaptive_avg_pool2d(x, 1)  # fine

    def pick(self, x):
        return isinstance(self.grid_pool, nn.AdaptiveAvgPool2d)  # fine


def loss(x, y):
    b = nn.NLLLoss()(x, y) + F.cross_entropy(x, y)  # expect: D9M103
    c = nn.NLLLoss(reduction="none")(x, y)  # fine
    d = nn.CTCLoss()(x, y, None, None)  # expect: D9M101
    return a + b + c + d


def graph(x, index, values, weights, n):
    x.index_add_(0, index, values)  # expect: D9M103
    x = x.index_add(0, index, values)  # expect: D9M103
    x[index] += values  # fine
    x[index] = values  # fine
    x.index_put_((index,), values, accumulate=True)  # expect: D9M103
    x.put_(index, values)  # expect: D9M101
    x.scatter_add_(0, index, values)  # expect: D9M103
    x.scatter_add_(0, index, torch.ones_like(values))  # fine
    x.index_add_(0, index, (values > 0).long())  # fine
    mask = values > 0
    x.index_add_(0, index, mask.unsqueeze(-1).float())  # fine
    x.index_add_(0, index, (values * mask).float())  # expect: D9M103
    count = torch.ones_like(values) if index is None else mask.to(x.dtype)
    x.scatter_add_(0, index, count)  # fine
    x.index_put_((index,), torch.ones_like(index), accumulate=True)  # fine
    x.index_copy_(0, index, values)  # expect: D9M103
    a = torch.zeros(n, 5).scatter_(1, index, 1.0)  # fine
    b = torch.zeros(n, 5).scatter_(1, index, values.sigmoid())  # expect: D9M103
    c = torch.zeros(n).scatter_reduce(0, index, values, reduce="amax")  # fine
    d = torch.zeros(n).scatter_reduce(0, index, values, reduce="prod")  # expect: D9M101
    c = torch.zeros(n).scatter(0, index, values, reduce="add")  # expect: D9M101
    e = torch.scatter_reduce(x, 0, index, values, "sum")  # expect: D9M103
    f = torch.Tensor.scatter_add_(x, 0, index, values)  # expect: D9M103


def read(x, index, repeats):
    a = pick(x, 1, index)  # expect: D9M103
    b = x.gather(1, index)  # expect: D9M103
    c = x.gather(dim=-1, index=index)  # expect: D9M103
    e = x.index_select(0, index)  # expect: D9M103
    f = x.repeat_interleave(2, dim=0)  # fine
    g = torch.repeat_interleave(x, torch.tensor([1, 2]), dim=0)  # expect: D9M103
    with torch.no_grad():
        j = x.gather(1, index)  # fine


def count(x, weights):
    a = torch.bincount(x)  # fine
    c = torch.bincount(x, weights=weights)  # expect: D9M101
    d = x.bincount(weights, 10)  # expect: D9M101
    e = torch.histc(x, bins=10)  # expect: D9M101
    g = x.cpu().bincount(weights)  # fine
    h = np.bincount([1, 2], weights=[0.5, 0.5])  # fine


def order(x, scores):
    a = x.median()  # fine
    b, where = torch.median(x, dim=1)  # expect: D9M101
    c = torch.median(x, dim=1).values  # fine
    e, there = torch.nanmedian(x, dim=1)  # expect: D9M101
    d = x.topk(5).indices  # fine
    i = x.cumsum(0)  # fine
    j = x.kthvalue(2)  # fine


def products(a, b):
    c = torch.bmm(a, b)  # fine
    d = torch.bmm(a.to_sparse(), b)  # expect: D9M103
    return c, d, a @ b  # fine


async def foreign(tasks, frame: pd.DataFrame, loader):
    done = await asyncio.gather(*tasks)  # fine
    plt.scatter([1, 2], [3, 4])  # fine
    figure, axis = plt.subplots()
    axis.scatter(done, done, 3)  # fine
    middle = frame.median(axis=1)  # fine
    array = np.zeros(3)
    array.put([0], [1.0])  # fine
    chosen = array.take([0])  # fine
    return middle, chosen, np.median(array, axis=0)  # fine


def attend(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)  # expect: D9M103
whole = torch.empty(3).index_copy(0, torch.arange(3), torch.zeros(3))  # expect: D9M103


@triton.autotune(  # expect: D9M106
    configs=[triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})],
    key=["n"],
)
@triton.jit
def tuned(x, n, BLOCK: tl.constexpr):
    tl.store(x, tl.sum(tl.load(x + tl.arange(0, BLOCK))))  # fine


@triton.autotune(configs=[triton.Config({"BLOCK": 64})], key=["n"])  # fine
@triton.jit
def fixed(x, n, BLOCK: tl.constexpr):
    tl.store(x, tl.sum(tl.load(x + tl.arange(0, BLOCK))))  # fine


def attend(q, k, v):
    a = flash_attn_func(q, k, v, causal=True)  # expect: D9M104
    b = flash_attn_func(q, k, v, causal=True, deterministic=True)  # fine
    return torch.stack([a, b])  # fine


@triton.jit
def added(x, place, BLOCK: tl.constexpr):
    tl.atomic_add(x + tl.load(place), tl.load(x))  # expect: D9M104


class Detector(torch.nn.Module):
    def __init__(self):
        self.convolution = DeformConv2d(3, 3, 3)  # expect: D9M101
        self.scan = Mamba(16)  # expect: D9M104
        self.second = Mamba2(16)  # fine

    def forward(self, q, k, v, x, boxes, index):
        a = flex_attention(q, k, v, score_mod=self.bias)  # expect: D9M102
        b = flex_attention(q, k, v)  # fine
        c = torchvision.ops.roi_pool(x, boxes, 7)  # expect: D9M101
        d = torchvision.ops.roi_align(x, boxes, 7)  # fine
        e, _ = scatter_max(x, index)  # expect: D9M104
        return a, b, c, d, e, segment_csr(x, index)  # fine


def reduced(tensor, images, adjacency, weights):
    chosen = torch.median(tensor, dim=1)  # fine
    given = torch.median(tensor, dim=1)  # expect: D9M101
    product = torch.sparse.mm(adjacency, weights, "mean")  # fine
    return chosen[0], given, product
