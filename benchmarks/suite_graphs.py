"""Rows of the part "graphs": calls that are captured in a CUDA graph, and replayed."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as nnf
from competitor import Competitor
from patch_workloads import Workload
from torch import Tensor, nn

from lightning_d9m.hashing.digest import digest_many

COMPILED = "torch.compile, reduce-overhead"
WAITING = ("bincount",)  # the host reads a value of the device, in torch's own version as well
WARM_UP = 3

Row = dict[str, Any]
Measure = Callable[[Callable[[], object]], Row]


def list_tensors(outputs: object) -> list[Tensor]:
    """Return the outputs of a call, detached."""
    parts = outputs if isinstance(outputs, tuple) else (outputs,)
    return [part.detach() for part in parts if isinstance(part, Tensor)]


def replay(workload: Workload, calls: int, measure: Measure) -> Row:
    """Capture a call under the present settings; compare and measure its replays."""
    if workload.op in WAITING:
        return {"unsupported": "the host waits for the device"}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # a gradient runs on the stream of the forward pass
        call = workload.make("cuda")
        for _ in range(WARM_UP):
            call()
        expected = tuple(digest_many(list_tensors(call())))
        eager = measure(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs = list_tensors(call())
    competitor = Competitor("cuda")
    seen = set()
    for turn in range(calls):
        competitor.disturb(turn)
        graph.replay()
        seen.add(tuple(digest_many(outputs)))
    row: Row = {"replayed_outputs": len(seen), "replay": measure(graph.replay), "eager": eager}
    if seen != {expected}:
        row["error"] = "replays differ from the call, or from each other"
    return row


class Resizing(nn.Module):
    """Padding, a convolution, upsampling and a sum by index."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1, padding_mode="replicate")

    def forward(self, images: Tensor, places: Tensor) -> Tensor:
        """Return sums of pixels of shape (5, 8)."""
        image = nnf.interpolate(self.convolution(images), scale_factor=2, mode="bilinear")
        pixels = image.movedim(1, 3).reshape(-1, 8)
        return pixels.new_zeros(5, 8).index_add(0, places, pixels)


def train_compiled(device: str, calls: int, mode: str | None) -> Row:
    """Compare the gradients of a compiled module in several calls."""
    torch.manual_seed(0)
    module = Resizing().to(device)
    images = torch.randn(2, 3, 16, 16, device=device)
    places = torch.randint(5, (2 * 32 * 32,), device=device)
    compiled = torch.compile(module, mode=mode) if mode else module
    seen = []
    for _ in range(WARM_UP + calls):
        module.zero_grad()
        compiled(images, places).square().sum().backward()
        seen.append(tuple(digest_many([part.grad for part in module.parameters()])))
    found = len({*seen[WARM_UP:]})
    return {"outputs": found, **({"error": "several outputs"} if found > 1 else {})}
