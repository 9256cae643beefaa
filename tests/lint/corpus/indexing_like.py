"""Indices that repeat entries of a parameter, and innocent ones."""

import numpy as np
import torch
from torch import nn
from torch.nn import Parameter


class Table(nn.Module):
    def __init__(self, places, size):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(16, 4))
        self.frozen = nn.Parameter(torch.randn(16, 4), requires_grad=False)
        self.either = Parameter(torch.randn(16))
        self.either = places
        self.register_buffer("fixed", torch.randn(16, 4))
        self.twice = torch.tensor([0, 0, 1])
        self.once = torch.tensor([0, 1, 2])
        self.maybe = torch.tensor([1, 1])
        self.maybe = places
        self.order = torch.randperm(16)
        self.size = size

    def forward(self, given, count):
        c = self.rows[self.twice]  # expect: D9M103
        e = self.rows[torch.arange(4).repeat(3), 0]  # expect: D9M103
        g = self.rows[[0, 0, 1]]  # expect: D9M103
        return c, e, g

    def read(self, given, count, index):
        one = torch.randint(0, 16, (1,))
        mask = torch.randint(0, 2, (16,)).bool()
        a = self.rows[one]  # fine
        b = self.rows[mask]  # fine
        c = self.rows[self.once]  # fine
        d = self.rows[self.order]  # fine
        e = self.rows[given]  # fine
        f = self.rows[index.repeat(2)]  # fine
        g = self.rows[torch.ones(16, dtype=torch.bool)]  # fine
        h = self.rows[torch.randint(0, 2, (16,), dtype=torch.bool)]  # fine
        i = self.frozen[torch.zeros(8, dtype=torch.long)]  # fine
        j = self.fixed[torch.zeros(8, dtype=torch.long)]  # fine
        k = self.either[torch.zeros(8, dtype=torch.long)]  # fine
        m = self.rows[self.maybe]  # fine
        n = self.rows[torch.tensor([True, True, False])]  # fine
        o = self.rows[torch.arange(4).repeat(1)]  # fine
        p = self.rows[0], self.rows[1:3], self.rows[[0, 1, 2]]  # fine
        q = self.rows[torch.randint(0, 2, (16,)).to(torch.bool)]  # fine
        r = self.rows[torch.zeros(1, dtype=torch.long)]  # fine
        s = self.rows[torch.tensor([True, False]).repeat(8)]  # fine
        t = given[torch.zeros(8, dtype=torch.long)]  # fine
        return a, b, c, d, e, f, g, h, i, j, k, m, n, o, p, q, r, s, t

    @torch.no_grad()
    def look(self):
        drawn = torch.randint(0, 16, (32,))
        return self.rows[drawn]  # fine

    @torch.no_grad()
    def write(self, values):
        self.rows[torch.randint(0, 16, (4,))] = values  # fine


def gather(values):
    x = torch.randn(8, requires_grad=True)
    z = torch.randn(8, requires_grad=True)
    z = z.detach()
    w = torch.randn(8)
    index = torch.tensor([3, 3, 5])
    loss = x[index].sum()  # expect: D9M103
    still = z[index].sum() + w[index].sum()  # fine
    with torch.no_grad():
        still = still + x[index].sum()  # fine
    numbers = np.random.rand(8)
    return loss, still, numbers[np.zeros(8, dtype=int)], values[index]  # fine
