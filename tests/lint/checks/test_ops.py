"""The spellings and the catalogue agree, and names are followed to them."""

import ast
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest
import torch
import torch.nn.attention.flex_attention

from lightning_d9m.ops.patches.catalog.catalog import OPS, FlagEffect, find_op
from lightning_d9m.tools.lint.checks.ops import FUNCTIONS, METHODS, check_op, explain_op, rule_of
from lightning_d9m.tools.lint.rules import RULES
from lightning_d9m.tools.lint.tree import Call, Tree

CORPUS = Path(__file__).parents[1] / "corpus" / "ops_like.py"
# Ops of the catalog that no spelling leads to although they vary.
OUT_OF_SIGHT = {
    "apple_devices": "a kind of device, and not an op",
    "ctc_loss_cudnn": "chosen by shapes",
    "cumprod": "the source does not say how many rows there are",
    "logcumsumexp": "the same",
    "cumsum": "deterministic; torch's documentation says otherwise",
    "embedding_dense_backward": "deterministic; patched for its speed",
    "kthvalue": "deterministic since 2.11",
    "topk": "chosen by sizes",
    "resize_quantized": "the source does not say what is quantized",
    "torchvision_roi_align_backward": "torchvision itself chooses a deterministic version",
    "grid_sampler_3d_backward": "spelled as the one in two dimensions",
}
CALLS = """
import torch
import torch.nn.functional as F
x = torch.zeros(2, 2)
i = torch.zeros(2)
{}
"""


def find_ops(source):
    tree = Tree(ast.parse(source))
    calls = [Call(node, tree) for node in tree.nodes if isinstance(node, ast.Call)]
    return [report for call in calls for report in check_op(call)]


def test_every_op_is_spelled_or_excused():
    """The linter has a rule for every op that the catalog calls nondeterministic."""
    sources = [CORPUS.read_text(encoding="utf-8")]
    # With a `score_mod`, without which flex attention has no bias.
    sources += [f"import {name.partition('.')[0]}\n{name}(0, 0, 0, x)" for name in FUNCTIONS]
    known = {report.op for source in sources for report in find_ops(source)}
    for op in OPS:
        if op.flag_effect is FlagEffect.UNNEEDED:
            assert op.name not in known
            continue
        assert op.name in known | OUT_OF_SIGHT.keys()
        assert rule_of(op) in RULES
        _, reason, fix = explain_op(op.name)
        assert op.cause in reason
        assert fix.endswith(".")


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_padding_is_that_of_its_dimensions(dims):
    (found,) = find_ops(CALLS.format(f"F.pad(x, {(1, 1) * dims}, mode='reflect')"))
    assert found.op == f"reflection_pad{dims}d_backward"


def test_every_spelling_exists():
    """A misspelt name would never be found."""
    for name in METHODS:
        assert callable(getattr(torch.Tensor, name))
    for path in (name[6:] for name in FUNCTIONS if name.startswith("torch.")):
        # Some functions exist only as methods.
        owner = torch if hasattr(torch, path.partition(".")[0]) else torch.Tensor
        assert callable(attrgetter(path)(owner))


def test_star_imports_are_followed(scan):
    assert scan("from torch.nn.functional import *\navg_pool3d(x, 2)\n") == [(2, "D9M101")]
    assert scan("from .torch.nn.functional import *\navg_pool3d(x, 2)\n") == []


def test_a_torch_that_needs_no_patch_is_not_accused(scan, monkeypatch):
    """An entry's releases count: one that a release of torch ended is found before, not after."""
    from lightning_d9m.tools.lint import scanner

    monkeypatch.setattr(scanner, "find_op", lambda name: replace(find_op(name), until="2.14"))
    source = "import torch\ntorch.nn.AvgPool3d(2)\n"
    for release, found in (("2.13", [(2, "D9M101")]), ("2.14", [])):
        monkeypatch.setattr(scanner, "read_torch_version", lambda release=release: release)
        assert scan(source) == found


@pytest.mark.parametrize(
    ("code", "op"),
    [
        ("torch.histc(x.to(dtype), 4)", "histc"),
        ("torch.bincount(i, x)", "bincount"),
        ("torch.bincount(i)", None),
        ("x.scatter_add(0, i, x)", "scatter_add"),
        ("x.scatter_add(0, i, i.new_ones(2))", None),  # a count is exact
        ("torch.zeros(2).scatter(0, i, torch.rand(2))", "scatter"),
        ("x.gather(0, i)", "gather_backward"),
        ("torch.tensor([1, 2]).gather(0, i)", None),  # it has no gradient
        ("torch.nn.AdaptiveAvgPool2d(7)", "adaptive_avg_pool2d_backward"),
        ("torch.nn.AdaptiveAvgPool2d((1, 1))", None),
        ("torch.median(x, **words)", "median"),
        ("torch.median(x, dim=1).indices", "median"),
        ("torch.median(x, dim=1)[0]", None),
    ],
)
def test_what_the_source_does_not_show_depends(code, op):
    found = find_ops(CALLS.format(f"def f(xp, dtype, words):\n    return {code}"))
    assert [(report.op, report.certainty) for report in found] == [(op, "depends")] * bool(op)
