"""Tables on a device, and gradients through them."""

import pytest
import torch
from patches.cases import GRADIENT_CASES, compute_gradient, make_inputs

from lightning_d9m.errors import D9mError
from lightning_d9m.patches.primitives.gather_tables import GatherTable, cached_on_device


def test_tables_are_built_once() -> None:
    built = []

    def build(size):
        built.append(size)
        return GatherTable(torch.arange(size), torch.zeros(size))

    tables = [cached_on_device(torch.device("cpu"), build, size) for size in (1, 2, 1)]
    assert built == [1, 2]
    assert tables[0] is tables[2]
    assert [table.outputs.tolist() for table in tables] == [[0], [0, 1], [0]]


def test_a_capture_that_would_copy_from_the_host_is_refused(monkeypatch) -> None:
    """The step has to run once before."""
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    with pytest.raises(D9mError, match="Run the same step once before the capture"):
        cached_on_device(torch.device("cuda", 0), GatherTable, 1)


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
