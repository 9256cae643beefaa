"""Whole models, forward and backward: each reaches its replacements, which cannot vary."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as nnf
from patches.cases import deterministic_algorithms
from patches.construction import judged
from torch import Tensor, nn

from lightning_d9m.patches.catalog.catalog import select_ops
from lightning_d9m.patches.registration import patches_applied

PIXELS = torch.arange(2 * 8 * 8).view(2, 8, 8) % 5
EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 5, 2], [1, 1, 1, 0, 0, 2, 1, 3]])


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    """Layers, and a loss of what they compute."""

    def __init__(self, score: Callable[["Model"], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.score = score
        for name, layer in layers.items():
            self.add_module(name, layer)


def segment(model: Model) -> Tensor:
    small = nnf.adaptive_avg_pool2d(model.inner(draw(2, 3, 8, 8)), 4)
    wide = nnf.interpolate(small, size=(8, 8), mode="bilinear")
    return nnf.nll_loss(wide.log_softmax(1), PIXELS)


def unite(model: Model) -> Tensor:
    fine = model.inner(draw(2, 3, 8, 8)).relu()
    pooled = nnf.max_pool2d(nnf.pad(fine, [1] * 4, mode="reflect"), 2)
    coarse = nnf.interpolate(model.outer(pooled), size=(8, 8), mode="bicubic")
    return nnf.cross_entropy(torch.cat([fine, coarse], 1), PIXELS)


def detect(model: Model) -> Tensor:
    features, boxes = model.inner(draw(2, 3, 8, 8)), model.outer(draw(2, 6))
    grid = nnf.affine_grid(boxes.view(2, 2, 3), [2, 5, 4, 4], align_corners=False)
    return nnf.grid_sample(features, grid, align_corners=False).square().mean()


def pass_messages(model: Model) -> Tensor:
    nodes = model.inner(draw(6, 4))
    summed = torch.zeros_like(nodes).index_add(0, EDGES[1], nodes[EDGES[0]])
    return model.outer(torch.cat([nodes, summed], 1)).square().mean()


def recommend(model: Model) -> Tensor:
    bags = model.inner(PIXELS[0])
    return (bags @ bags.T + model.outer(draw(8, 4))).sigmoid().mean()


def transcribe(model: Model) -> Tensor:
    steps = model.inner(draw(12, 2, 3)).log_softmax(2)
    return nnf.ctc_loss(steps, torch.tensor([[1, 2, 2], [3, 4, 1]]), [12, 10], [3, 2])


def convolve(inputs: int) -> nn.Module:
    return nn.Conv2d(inputs, 5, 3, padding=1)


MODELS: dict[str, tuple[Callable[[], Model], set[str]]] = {
    "segmentation": (
        lambda: Model(segment, inner=convolve(3)),
        {"adaptive_avg_pool2d_backward", "upsample_bilinear2d_backward", "nll_loss2d_forward"},
    ),
    "U-Net": (
        lambda: Model(unite, inner=convolve(3), outer=convolve(5)),
        {"upsample_bicubic2d_backward", "reflection_pad2d_backward", "nll_loss2d_forward"},
    ),
    "detection": (
        lambda: Model(detect, inner=convolve(3), outer=nn.Linear(6, 6)),
        {"grid_sampler_2d_backward"},
    ),
    "GraphSAGE": (
        lambda: Model(pass_messages, inner=nn.Linear(4, 4), outer=nn.Linear(8, 2)),
        {"index_add", "index_put_impl"},
    ),
    "DLRM": (
        lambda: Model(recommend, inner=nn.EmbeddingBag(5, 4, mode="max"), outer=nn.Linear(4, 8)),
        {"embedding_bag_dense_backward"},
    ),
    "CTC": (lambda: Model(transcribe, inner=nn.Linear(3, 5)), {"ctc_loss_backward"}),
}


def train(make: Callable[[], Model]) -> list[Tensor]:
    """Return the loss and the gradients."""
    torch.manual_seed(0)
    model = make()
    loss = model.score(model)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_on_its_replacements(name: str, monkeypatch, one_thread) -> None:
    make, wanted = MODELS[name]
    expected = train(make)
    ops = select_ops(torch.__version__)
    with judged(ops, monkeypatch) as (judge, ran), patches_applied("CPU"):
        with deterministic_algorithms():
            actual = train(make)
        assert all(map(torch.equal, actual, train(make)))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
    assert wanted <= {path.rpartition(":")[2] for path in ran}
    assert judge.refused == set()
