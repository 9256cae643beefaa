"""Windows of a pooling along one dimension: the inputs that each output reads."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_d9m.patches.primitives.gather_tables import GatherTable, build_gather_table


class Window(NamedTuple):
    """The windows of a pooling with a fixed stride, along one dimension, in elements."""

    size: int
    stride: int
    padding: int
    dilation: int = 1


def read_windows(
    dims: int,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] = (1,),
) -> list[Window]:
    """Expand pooling arguments to one window for each dimension; as in torch, one number may do."""
    sides = [
        list(values) * (dims if len(values) == 1 else 1)
        for values in (kernel_size, stride or kernel_size, padding, dilation)
    ]
    return [Window(*side) for side in zip(*sides, strict=True)]


def is_pooled(grad_output: Tensor, self: Tensor, dims: int) -> bool:
    """Return whether an output's gradient fits the input of a pooling, but for its sizes."""
    return (
        self.dim() in (dims + 1, dims + 2)
        and grad_output.shape[:-dims] == self.shape[:-dims]
        and grad_output.dim() == self.dim()
        and grad_output.dtype == self.dtype
        and self.is_floating_point()
        and min(*self.shape[1:], *grad_output.shape[-dims:]) > 0
    )


def count_outputs(size: int, window: Window, *, ceil_mode: bool) -> int:
    """Return the number of windows along one dimension (torch's ``pooling_output_shape``)."""
    extent = window.dilation * (window.size - 1) + 1
    span = size + 2 * window.padding - extent
    outputs = (span + (window.stride - 1 if ceil_mode else 0)) // window.stride + 1
    # The last window must start inside the input or the left padding.
    if ceil_mode and (outputs - 1) * window.stride >= size + window.padding:
        outputs -= 1
    return outputs


def count_adaptive_windows(inputs: int, outputs: int) -> int:
    """Return the greatest number of windows of an adaptive pooling that contain one input."""
    if outputs % inputs == 0:
        return outputs // inputs
    return 1 if inputs % outputs == 0 else outputs // inputs + 2


def build_mean_table(
    input_size: int, output_size: int, window: Window, count_include_pad: bool
) -> GatherTable:
    """Return the gather table of an average pooling with a fixed stride."""
    starts = _range(output_size) * window.stride - window.padding
    ends = (starts + window.size).clamp(max=input_size + window.padding)
    inside = starts.clamp(min=0), ends.clamp(max=input_size)
    divisor = ends - starts if count_include_pad else inside[1] - inside[0]
    return _build_window_table(*inside, input_size, divisor)


def build_adaptive_table(input_size: int, output_size: int) -> GatherTable:
    """Return the table of an adaptive pooling: window o is ``[o*i//n, ceil((o+1)*i/n))``."""
    outputs = _range(output_size)
    starts = outputs * input_size // output_size
    ends = -(-(outputs + 1) * input_size // output_size)
    return _build_window_table(starts, ends, input_size, ends - starts)


def _build_window_table(
    starts: Tensor, ends: Tensor, input_size: int, divisor: Tensor
) -> GatherTable:
    lengths = (ends - starts).clamp(min=0)
    outputs = torch.repeat_interleave(_range(len(starts)), lengths)
    within = _range(len(outputs)) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    return build_gather_table(starts[outputs] + within, outputs, input_size, divisor=divisor)


def _range(size: int) -> Tensor:
    return torch.arange(size, dtype=torch.int64, device="cpu")
