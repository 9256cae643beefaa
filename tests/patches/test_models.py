"""Whole models, forward and backward: each reaches its replacements, which cannot vary."""

import pytest
import torch
import torch.nn.functional as nnf
from patches.cases import deterministic_algorithms
from patches.construction import judged
from torch import Tensor, nn

from lightning_d9m.patches.catalog.catalog import select_ops
from lightning_d9m.patches.registration import patches_applied

PIXELS = torch.arange(2 * 8 * 8).view(2, 8, 8) % 5
SOURCES, TARGETS = torch.tensor([[0, 1, 2, 3, 4, 5, 5, 2], [1, 1, 1, 0, 0, 2, 1, 3]])
DRAWS = torch.Generator().manual_seed(1)
IMAGES = torch.randn(2, 3, 8, 8, generator=DRAWS)
BOXES, NODES = IMAGES.view(-1)[:12].view(2, 6), IMAGES.view(-1)[:24].view(6, 4)


def segment(inner: nn.Module) -> Tensor:
    small = nnf.adaptive_avg_pool2d(inner(IMAGES), 4)
    wide = nnf.interpolate(small, size=(8, 8), mode="bilinear")
    return nnf.nll_loss(wide.log_softmax(1), PIXELS)


def unite(inner: nn.Module, outer: nn.Module) -> Tensor:
    fine = inner(IMAGES).relu()
    pooled = nnf.max_pool2d(nnf.pad(fine, [1] * 4, mode="reflect"), 2)
    coarse = nnf.interpolate(outer(pooled), size=(8, 8), mode="bicubic")
    return nnf.cross_entropy(torch.cat([fine, coarse], 1), PIXELS)


def detect(inner: nn.Module, outer: nn.Module) -> Tensor:
    grid = nnf.affine_grid(outer(BOXES).view(2, 2, 3), [2, 5, 4, 4], align_corners=False)
    return nnf.grid_sample(inner(IMAGES), grid, align_corners=False).square().mean()


def pass_messages(inner: nn.Module, outer: nn.Module) -> Tensor:
    nodes = inner(NODES)
    summed = torch.zeros_like(nodes).index_add(0, TARGETS, nodes[SOURCES])
    return outer(torch.cat([nodes, summed], 1)).square().mean()


def recommend(inner: nn.Module, outer: nn.Module) -> Tensor:
    bags = inner(PIXELS[0])
    return (bags @ bags.T + outer(IMAGES[0, 0, :, :4])).sigmoid().mean()


def transcribe(inner: nn.Module) -> Tensor:
    steps = inner(IMAGES[..., :3].reshape(-1, 2, 3)[:12]).log_softmax(2)
    return nnf.ctc_loss(steps, torch.tensor([[1, 2, 2], [3, 4, 1]]), [12, 10], [3, 2])


def convolve(inputs: int) -> nn.Module:
    return nn.Conv2d(inputs, 5, 3, padding=1)


# What is computed, its layers, and the replacements that it has to reach.
MODELS = {
    "segmentation": (
        (segment, convolve(3)),
        "adaptive_avg_pool2d_backward upsample_bilinear2d_backward nll_loss2d_forward",
    ),
    "U-Net": (
        (unite, convolve(3), convolve(5)),
        "upsample_bicubic2d_backward reflection_pad2d_backward nll_loss2d_forward",
    ),
    "detection": ((detect, convolve(3), nn.Linear(6, 6)), "grid_sampler_2d_backward"),
    "GraphSAGE": ((pass_messages, nn.Linear(4, 4), nn.Linear(8, 2)), "index_add index_put_impl"),
    "DLRM": (
        (recommend, nn.EmbeddingBag(5, 4, mode="max"), nn.Linear(4, 8)),
        "embedding_bag_dense_backward",
    ),
    "CTC": ((transcribe, nn.Linear(3, 5)), "ctc_loss_backward"),
}


@pytest.mark.parametrize(("model", "wanted"), MODELS.values(), ids=MODELS)
def test_a_model_trains_on_its_replacements(model, wanted, monkeypatch, one_thread) -> None:
    score, *layers = model

    def train() -> list[Tensor]:
        loss = score(*layers)
        parameters = [own for layer in layers for own in layer.parameters()]
        return [loss.detach(), *torch.autograd.grad(loss, parameters)]

    expected, ops = train(), select_ops(torch.__version__)
    with judged(ops, monkeypatch) as (judge, ran), patches_applied("CPU"):
        with deterministic_algorithms():
            actual = train()
        assert all(map(torch.equal, actual, train()))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
    assert {*wanted.split()} <= {path.rpartition(":")[2] for path in ran}
    assert judge.refused == set()
