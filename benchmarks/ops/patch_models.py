"""Training steps of whole models that call patched ops, timed with and without determinism."""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

Step = Callable[[], None]


class UNet(nn.Module):
    """Three levels, reflection padding, bilinear up and adaptive pooling at the bottom."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sides = [3, width, 2 * width, 4 * width]
        self.down = nn.ModuleList(
            nn.Conv2d(a, b, 3, padding=1, padding_mode="reflect") for a, b in pairwise(sides)
        )
        self.up = nn.ModuleList(
            nn.Conv2d(b + a, a, 3, padding=1, padding_mode="reflect")
            for a, b in reversed(list(pairwise(sides[1:])))
        )
        self.gate = nn.Linear(sides[-1], sides[-1])
        self.head = nn.Conv2d(width, 21, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of shape (N, 21, H, W)."""
        kept = []
        for layer in self.down:
            x = nnf.relu(layer(x))
            kept.append(x)
            x = nnf.max_pool2d(x, 2)
        x = nnf.interpolate(x, scale_factor=2, mode="bicubic")
        x = x * self.gate(nnf.adaptive_avg_pool2d(x, 1).flatten(1))[..., None, None].sigmoid()
        for layer, skip in zip(self.up, kept[-2::-1], strict=True):
            x = nnf.interpolate(x, size=skip.shape[-2:], mode="bilinear")
            x = nnf.relu(layer(torch.cat([x, skip], dim=1)))
        return self.head(x)


class GraphNet(nn.Module):
    """Four rounds of messages, added by ``index_add``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rounds = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(4))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        """Return the nodes' features after all rounds."""
        for layer in self.rounds:
            messages = nodes.index_select(0, edges[0])
            inbox = torch.zeros_like(nodes).index_add(0, edges[1], messages)
            nodes = nnf.relu(layer(torch.cat([nodes, inbox], dim=1)))
        return nodes


def _train(model: nn.Module, score: Callable[[], Tensor]) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=False)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        score().backward()
        optimizer.step()

    return step


def make_unet(device: str, scale: int) -> Step:
    model = UNet(32).to(device)
    images = torch.randn(2 * scale, 3, 32 * scale, 32 * scale, device=device)
    masks = torch.randint(21, (2 * scale, 32 * scale, 32 * scale), device=device)
    return _train(model, lambda: nnf.nll_loss(model(images).log_softmax(1), masks))


def make_graph(device: str, scale: int) -> Step:
    model = GraphNet(128).to(device)
    nodes = torch.randn(2500 * scale, 128, device=device)
    edges = torch.randint(2500 * scale, (2, 25_000 * scale), device=device)
    return _train(model, lambda: model(nodes, edges).square().mean())


MODELS = {
    "U-Net with upsampling": make_unet,
    "graph network with index_add": make_graph,
}
