"""Rows of the part "graphs": calls that are captured in a CUDA graph, and replayed."""

import torch
import torch.nn.functional as nnf
from patch_workloads import Workload
from suite_journal import Row
from suite_measures import Settings, collect_outputs, list_outputs, measure
from torch import Tensor, nn

from lightning_d9m.engine.hashing.digest import digest_many

COMPILED = "torch.compile, reduce-overhead"
WAITING = ("bincount",)  # the host reads a value of the device, in torch's own version as well
WARM_UP = 3


def replay(workload: Workload, settings: Settings) -> Row:
    """Capture a call under the present settings; compare and measure its replays."""
    if workload.op in WAITING:
        return {"unsupported": "the host waits for the device"}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # a gradient runs on the stream of the forward pass
        call = workload.make("cuda")
        for _ in range(WARM_UP):
            call()
        expected = tuple(digest_many(list_outputs(call())))
        eager = measure(call, settings)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs = list_outputs(call())

    def run_again() -> tuple[Tensor, ...]:
        graph.replay()
        return tuple(outputs)

    seen = collect_outputs(run_again, settings)
    times = {"replay": measure(graph.replay, settings), "eager": eager}
    row: Row = {"replayed_outputs": len(seen), **times}
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


def train_compiled(settings: Settings) -> Row:
    """Compare the gradients of a compiled module in several calls."""
    device = settings.device
    torch.manual_seed(0)
    module = Resizing().to(device)
    images = torch.randn(2, 3, 16, 16, device=device)
    places = torch.randint(5, (2 * 32 * 32,), device=device)
    compiled = torch.compile(module, mode="reduce-overhead") if device == "cuda" else module
    seen = []
    for _ in range(WARM_UP + settings.calls):
        module.zero_grad()
        compiled(images, places).square().sum().backward()
        seen.append(tuple(digest_many([part.grad for part in module.parameters()])))
    found = len({*seen[WARM_UP:]})
    return {"outputs": found, **({"error": "several outputs"} if found > 1 else {})}
