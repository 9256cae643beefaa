"""Names that a list of names would find, in a program that has nothing to do with torch's ops."""

import torch
from scipy import interpolate, ndimage


class Table:
    def gather(self, keys):
        return keys

    def scatter(self, keys, values, how):
        return keys, values, how

    def index_select(self, key):
        return key

    def resize_(self, n):
        return n

    def use(self, keys):
        a = self.gather(keys)  # fine
        b = self.scatter(1, keys, keys)  # fine
        c = self.index_select(keys)  # fine
        return a, b, c


class Conv2d:
    def __init__(self, width):
        self.width = width


class ops:
    class AvgPool3d:
        pass


layer = Conv2d(3)  # fine
own = ops.AvgPool3d()  # fine
curve = interpolate.interpolate([1, 2], [3, 4], mode="linear")  # fine
image = ndimage.median([1, 2, 3])  # fine
size = torch.zeros(3).resize_(2)  # fine
tensor = torch.zeros(3).cumsum(0)  # fine
text = "F.interpolate(x, mode='bilinear')"  # fine
table = Table()
rows = table.gather([1])  # fine
plot = table.scatter([1], [2], "o")  # fine
bins = {}.get("histc")  # fine
