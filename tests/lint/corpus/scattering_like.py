"""Indexing, in tensors and in what only looks like one."""

import asyncio

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from torch import gather as pick


def graph(x, index, values, weights, n):
    x.index_add_(0, index, values)  # expect: D9M103
    x = x.index_add(0, index, values)  # expect: D9M103
    x[index] += values  # fine
    x[index] = values  # fine
    x.index_put_((index,), values, accumulate=True)  # expect: D9M103
    x.put_(index, values)  # expect: D9M101
    x.scatter_add_(0, index, values)  # expect: D9M103
    x.index_copy_(0, index, values)  # expect: D9M103
    x.index_fill_(0, index, 0.0)  # fine
    x.masked_fill_(index > 0, 0.0)  # fine
    a = torch.zeros(n, 5).scatter_(1, index, 1.0)  # fine
    b = torch.zeros(n, 5).scatter_(1, index, values.sigmoid())  # expect: D9M103
    c = torch.zeros(n).scatter_reduce(0, index, values, reduce="amax")  # fine
    d = torch.zeros(n).scatter_reduce(0, index, values, reduce="prod")  # expect: D9M101
    e = torch.scatter_reduce(x, 0, index, values, "sum")  # expect: D9M103
    f = torch.Tensor.scatter_add_(x, 0, index, values)  # expect: D9M103
    return a, b, c, d, e, f


def read(x, index, repeats):
    a = pick(x, 1, index)  # expect: D9M103
    b = x.gather(1, index)  # expect: D9M103
    c = x.gather(dim=-1, index=index)  # expect: D9M103
    d = torch.take_along_dim(x, index, 1)  # expect: D9M103
    e = x.index_select(0, index)  # expect: D9M103
    f = x.repeat_interleave(2, dim=0)  # fine
    g = torch.repeat_interleave(x, torch.tensor([1, 2]), dim=0)  # expect: D9M103
    h = x.repeat(2, 1)  # fine
    i = torch.take(x, index)  # expect: D9M101
    with torch.no_grad():
        j = x.gather(1, index)  # fine
    return a, b, c, d, e, f, g, h, i, j


def count(x, weights):
    a = torch.bincount(x)  # fine
    b = torch.bincount(x, minlength=10)  # fine
    c = torch.bincount(x, weights=weights)  # expect: D9M101
    d = x.bincount(weights, 10)  # expect: D9M101
    e = torch.histc(x, bins=10)  # expect: D9M101
    f = torch.histc(x.long(), bins=10)  # fine
    g = x.cpu().bincount(weights)  # fine
    h = np.bincount([1, 2], weights=[0.5, 0.5])  # fine
    return a, b, c, d, e, f, g, h


def order(x, scores):
    a = x.median()  # fine
    b, where = torch.median(x, dim=1)  # expect: D9M101
    c = torch.median(x, dim=1).values  # fine
    d = x.topk(5).indices  # fine
    e = torch.topk(x, 5)[0]  # fine
    f, g = scores.topk(3, dim=-1)  # fine
    h, _ = torch.topk(scores, 3)  # fine
    i = x.cumsum(0)  # fine
    j = x.kthvalue(2)  # fine
    k = torch.sort(x, stable=True)  # fine
    return a, b, c, d, e, f, g, h, i, j, k, where


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
