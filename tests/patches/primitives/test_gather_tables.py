"""The cache of tables on a device."""

import pytest
import torch
from patches.cases import GRADIENT_CASES, compute_gradient, make_inputs

from lightning_d9m.errors import D9mError
from lightning_d9m.patches.primitives import gather_tables
from lightning_d9m.patches.primitives.gather_tables import DeviceCache, GatherTable

CUDA = torch.device("cuda", 0)


class Builds(list):
    """Builder of a table that remembers its calls."""

    def __call__(self, size: int) -> GatherTable:
        self.append(size)
        return GatherTable(torch.arange(size), torch.zeros(size))

    __hash__ = object.__hash__


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Replace the calls that need a device; ``capturing`` says whether a graph is captured."""
    state: dict[str, object] = {"capturing": False, "used": []}
    monkeypatch.setattr(gather_tables, "_is_capturing", lambda: state["capturing"])
    monkeypatch.setattr(gather_tables, "_record_use", lambda parts, _: state["used"].append(parts))
    monkeypatch.setattr(gather_tables, "_build_on_device", lambda _, build, sizes: build(*sizes))
    return state


def test_tables_are_built_once_and_the_oldest_is_evicted() -> None:
    """Two entries fit; the one that was not used last goes."""
    cache, build = DeviceCache(2), Builds()
    for size in (1, 2, 1, 3, 1, 2):
        parts = cache.get((torch.device("cpu"), build, (size,)))
        assert parts[0].tolist() == list(range(size))
    assert build == [1, 2, 3, 2]


def test_tables_of_a_captured_graph_are_never_evicted(on_cuda: dict[str, object]) -> None:
    """Its replays read their memory."""
    cache, build = DeviceCache(1), Builds()
    cache.get((CUDA, build, (1,)))
    on_cuda["capturing"] = True
    captured = cache.get((CUDA, build, (1,)))
    on_cuda["capturing"] = False
    for size in (2, 3, 4):
        cache.get((CUDA, build, (size,)))
    assert cache.get((CUDA, build, (1,))) is captured
    assert build == [1, 2, 3, 4]


def test_a_capture_that_would_copy_from_the_host_is_refused(on_cuda: dict[str, object]) -> None:
    """The step has to run once before."""
    cache, build = DeviceCache(1), Builds()
    on_cuda["capturing"] = True
    with pytest.raises(D9mError, match="Run the same step once before the capture"):
        cache.get((CUDA, build, (1,)))
    assert build == []


def test_every_use_is_recorded_on_its_stream(on_cuda: dict[str, object]) -> None:
    """Evicted memory is not reused while another stream reads it."""
    cache, build = DeviceCache(1), Builds()
    first, second = (cache.get((CUDA, build, (1,))) for _ in range(2))
    assert first is second
    assert [id(parts) for parts in on_cuda["used"]] == [id(first)] * 2


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize(
    "case",
    [case for case in GRADIENT_CASES if "flection" in case.label or "cation" in case.label],
    ids=lambda case: case.label,
)
def test_padding_of_complex_tensors_has_a_gradient(case, dtype) -> None:
    """As torch's: at most 40 terms in another order."""
    image, gradient = make_inputs(case, torch.float64)
    image, gradient = image.to(dtype), torch.complex(gradient, gradient.flip(-1)).to(dtype)
    expected = compute_gradient(case, image, gradient, patched=False)
    actual = compute_gradient(case, image, gradient, patched=True)
    bound = 40 * torch.finfo(dtype).eps * float(gradient.abs().max())
    torch.testing.assert_close(actual, expected, rtol=0, atol=bound)
    assert actual.stride() == expected.contiguous().stride()
