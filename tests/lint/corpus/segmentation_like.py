"""Upsampling, padding and sampling, under many names."""

import functools

import torch
import torch.nn.functional
from torch import nn
from torch.nn import functional as fn
from torch.nn.functional import grid_sample, interpolate as up, pad
from torch.nn.modules.upsampling import Upsample

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
        self.nearest = nn.UpsamplingNearest2d(scale_factor=2)  # fine
        self.reflect = nn.ReflectionPad2d(1)  # expect: D9M103
        self.replicate = nn.ReplicationPad2d(1)  # expect: D9M103
        self.zeros = nn.ZeroPad2d(1)  # fine
        self.constant = nn.ConstantPad2d(1, 0.0)  # fine
        self.unpool = nn.MaxUnpool2d(2)  # expect: D9M101
        self.shuffle = nn.PixelShuffle(2)  # fine

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
        x = fn.interpolate(  # expect: D9M103
            x,
            size=size,
            mode="bilinear",
        )
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
