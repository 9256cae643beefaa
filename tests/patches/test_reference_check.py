"""The first use of a replacement on a device is compared with the CPU."""

import warnings

import pytest
import torch

from lightning_d9m.patches import registration
from lightning_d9m.patches.kernels import index_reduce, order_statistics
from lightning_d9m.patches.primitives.segment_reduce import Update
from lightning_d9m.patches.reference_check import agrees_with_cpu
from lightning_d9m.patches.registration import Kernel

KEYS = torch._C._dispatch_keys(torch.empty(0))


class Scripted:
    """A replacement that returns one result after the other, and counts its calls."""

    def __init__(self, *results: object) -> None:
        self.results = list(results)
        self.calls = 0

    def __call__(self, original, *args: object, **kwargs: object) -> object:
        self.calls += 1
        result = self.results.pop(0) if len(self.results) > 1 else self.results[0]
        return result(original) if callable(result) else result


def make_kernel(replacement: Scripted, op: object) -> Kernel:
    """Return a kernel whose original returns or writes -1."""

    def original(keyset, target, *args, **kwargs):
        return torch.full_like(target, -1)

    return Kernel(replacement, original, op._schema, offered=False, check=True)


RELU = torch.ops.aten.relu.default


def test_equal_results_are_compared_once() -> None:
    """Three calls, one of them computed twice; a rounding error is not a disagreement."""
    near = torch.tensor([1.0, 2.0 + 1e-6, float("nan")])
    replacement = Scripted(near, torch.tensor([1.0, 2.0, float("nan")]), near)
    kernel = make_kernel(replacement, RELU)
    for _ in range(3):
        assert torch.equal(kernel(KEYS, torch.zeros(3))[:2], near[:2])
    assert replacement.calls == 4


@pytest.mark.parametrize(
    "wrong",
    [
        torch.tensor([1.0, 2.1]),
        torch.tensor([1.0, float("nan")]),
        torch.tensor([1.0]),
        torch.tensor([1.0, 2.0], dtype=torch.float64),
    ],
    ids=["value", "nan", "shape", "dtype"],
)
def test_a_replacement_that_disagrees_is_not_used(wrong: torch.Tensor) -> None:
    """One warning; torch's kernel answers, at once and from then on."""
    replacement = Scripted(wrong, torch.tensor([1.0, 2.0]))
    kernel = make_kernel(replacement, RELU)
    with pytest.warns(UserWarning, match="aten::relu gave a different result on this device"):
        assert kernel(KEYS, torch.zeros(2)).tolist() == [-1, -1]
    with warnings.catch_warnings(action="error"):
        assert kernel(KEYS, torch.zeros(2)).tolist() == [-1, -1]
    assert replacement.calls == 2


def test_an_update_in_place_writes_only_if_it_agrees() -> None:
    """The tensor keeps its values until the comparison."""
    add, subtract = (Update(lambda x, by=by: x.add_(by)) for by in (1, -1))
    op = torch.ops.aten.relu_.default
    target = torch.zeros(2)
    assert make_kernel(Scripted(add, add), op)(KEYS, target) is target
    assert target.tolist() == [1, 1]
    with pytest.warns(UserWarning, match="Please report the case"):
        make_kernel(Scripted(subtract, add), op)(KEYS, target)
    assert target.tolist() == [1, 1]


def test_a_call_that_is_left_to_torch_is_not_compared() -> None:
    """Nothing is copied to the host for it, however often it comes."""
    replacement = Scripted(lambda original: original(torch.zeros(2)))
    kernel = make_kernel(replacement, RELU)
    for _ in range(5):
        assert kernel(KEYS, torch.zeros(2)).tolist() == [-1, -1]
    assert replacement.calls == 5


def test_what_the_cpu_cannot_compute_is_tried_three_times() -> None:
    """Then the replacement is trusted, and costs nothing more."""

    def fail(original: object) -> None:
        raise NotImplementedError

    one = torch.ones(2)
    replacement = Scripted(*[one, fail] * 3, one)
    kernel = make_kernel(replacement, RELU)
    for _ in range(5):
        assert torch.equal(kernel(KEYS, torch.zeros(2)), one)
    assert replacement.calls == 8


def test_what_the_cpu_leaves_to_torch_is_compared_later() -> None:
    """The first call cannot be compared, the second is found wrong."""
    one, two = torch.ones(2), torch.full((2,), 2.0)
    replacement = Scripted(one, lambda original: original(), two, one)
    kernel = make_kernel(replacement, RELU)
    assert torch.equal(kernel(KEYS, torch.zeros(2)), one)
    with pytest.warns(UserWarning, match="different result"):
        kernel(KEYS, torch.zeros(2))


def test_each_device_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that is right on one may be wrong on another."""
    seen = []

    def agree(_replacement: object, args: tuple[torch.Tensor], *_rest: object) -> bool:
        seen.append(args[0].device.type)
        return True

    monkeypatch.setattr(registration, "agrees_with_cpu", agree)
    kernel = make_kernel(Scripted(torch.ones(2)), RELU)
    for device in ("cpu", "meta", "cpu", "meta"):
        kernel(KEYS, torch.zeros(2, device=device))
    assert seen == ["cpu", "meta"]


def test_integers_have_to_be_equal() -> None:
    """Of a real kernel: the right index, and a wrong one."""
    values = torch.tensor([[3.0, 1.0, 3.0]])
    right = order_statistics.median_dim(None, values, 1)
    assert agrees_with_cpu(order_statistics.median_dim, (values, 1), {}, right)
    wrong = (right[0], right[1] + 2)
    assert agrees_with_cpu(order_statistics.median_dim, (values, 1), {}, wrong) is False


def test_a_real_update_is_compared() -> None:
    """Of ``index_reduce``: the target of the caller is not written."""
    target, index, source = torch.ones(3), torch.tensor([0, 0]), torch.tensor([2.0, 3.0])
    arguments = (target, 0, index, source, "prod")
    expected = torch.tensor([6.0, 1.0, 1.0])
    assert agrees_with_cpu(index_reduce.index_reduce, arguments, {}, (expected,))
    assert not agrees_with_cpu(index_reduce.index_reduce, arguments, {}, (expected + 1,))
    assert torch.equal(target, torch.ones(3))
