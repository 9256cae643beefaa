"""Products, sums and formulas in Triton, as executed PTX: the bits of the C kernels."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton has packages for Linux only")

from executed import executed, recorded, run_block
from kernel_inputs import draw, make_numbers, make_rows, read_bits

from lightning_d9m.errors import NotPortableError
from lightning_d9m.ops.patches.triton import launch
from lightning_d9m.ops.portability import arithmetic, kernels
from lightning_d9m.ops.portability.formulas import FUNCTIONS, KERNELS
from lightning_d9m.ops.portability.kernels import Offsets
from lightning_d9m.ops.portability.mode import PortableMode
from lightning_d9m.ops.portability.triton import formulas as triton_formulas
from lightning_d9m.ops.portability.triton import kernels as triton_kernels

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def check(function, *given, **named):
    """Call a function of ``kernels`` twice, by C and by Triton; compare results and inputs."""
    others = [one.clone() if isinstance(one, torch.Tensor) else one for one in given]
    copies = {k: one.clone() if isinstance(one, torch.Tensor) else one for k, one in named.items()}
    expected = function(*given, **named)
    with executed() as launches:
        found = function(*others, **copies)
    names = [one.kernel.__name__ for one in launches]
    assert names
    if isinstance(found, torch.Tensor):
        found, expected = (found,), (expected,)
    pairs = [*zip(found, expected, strict=True)]
    pairs += [(copies[name], one) for name, one in named.items() if isinstance(one, torch.Tensor)]
    for one, other in pairs:
        assert one.shape == other.shape
        assert read_bits(one) == read_bits(other)
    return names


@DTYPES
@pytest.mark.parametrize(
    ("tile", "sizes"), [(64, (1, 70, 2, 66)), (16, (2, 17, 4, 5)), (16, (1, 3, 300, 2))]
)
def test_products(tile, sizes, dtype, monkeypatch):
    """Of edges of tiles, of two blocks of terms, and of matrices that are transposed in memory."""
    monkeypatch.setattr(triton_kernels, "_TILE", tile)
    batch, rows, terms, columns = sizes
    left = draw(batch, terms, rows, dtype=dtype).mT
    left[:, 0] *= 1e-30 if dtype == torch.float32 else 1e-300
    left[:, -1, 0] = torch.inf
    right = draw(batch, terms, columns, dtype=dtype, seed=1)
    right[..., 1] *= 1e-12
    assert check(kernels.multiply, left, right) == ["multiply_tiles"]


@pytest.mark.parametrize(
    ("shape", "dims", "launches"),
    [
        *[((5, 7), (1,), 1), ((70, 34), (0,), 1), ((4500,), (0,), 2), ((3, 4, 5, 3), (0, 2, 3), 1)],
        *[((2, 3, 4, 5, 6), (1, 3), 1), ((3, 4100, 2), (1,), 2), ((), (), 1), ((3, 1, 9), (1,), 1)],
    ],
)
def test_sums(shape, dims, launches):
    dtype = torch.float64 if len(shape) % 2 else torch.float32
    assert len(check(kernels.add, draw(*shape, dtype=dtype), dims)) == launches


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    """Of any bits, of special values, and of usual ones, in one of the types."""
    dtype = torch.float64 if len(name) % 3 == 0 else torch.float32
    inputs = make_numbers(name, 60, dtype)
    assert check(kernels.compute, name, **inputs) == ["kernel"]


@pytest.mark.parametrize("name", sorted(KERNELS.keys() - FUNCTIONS.keys()))
def test_kernels_of_rows_and_elements(name):
    base, _, _ = name.partition("_without_")
    sizes = (2, 4100) if base == "softmax_backward_data" else (6, 45)  # two blocks of terms
    check(kernels.compute, base, **make_rows(name, *sizes, turn=len(name)))


def test_a_fused_multiplication_differs(monkeypatch):
    """The control: the tests above compare what depends on each rounding."""
    given = {"x": draw(6, 45), "numbers": [1e-5], "weight": draw(45, seed=1), "bias": draw(45)}
    expected = kernels.compute("layer_norm", **given)
    monkeypatch.setitem(launch.OPTIONS, "enable_fp_fusion", True)
    with executed(exact=False):
        found = kernels.compute("layer_norm", **given)
        assert read_bits(found[0]) != read_bits(expected[0])
        torch.testing.assert_close(found, expected)
    # Before its first use it computes an example, and is withdrawn: torch operations serve.
    warned = pytest.warns(UserWarning, match="its bits for a small example are not the CPU's")
    with executed(exact=False, check=launch._check), warned:
        found = kernels.compute("layer_norm", **given)
    assert [*map(read_bits, found)] == [*map(read_bits, expected)]


def test_each_kernel_computes_an_example_first(monkeypatch):
    monkeypatch.setattr(triton_kernels, "_TILE", 16)
    x = draw(3, 5)
    with executed(check=launch._check) as launches:
        kernels.multiply(x[None], x.mT[None])
        kernels.add(x, [0])
        kernels.compute("sigmoid", x=x)
        assert not launch._withdrawn
        checked = {path.removeprefix(f"{kernels._TRITON}.") for path, *_ in launch._checked}
    assert len(launches) == 3 + 4  # the example of a sum takes two launches
    assert checked == {"kernels:multiply", "kernels:add", "formulas:sigmoid"}


def test_a_number_on_the_cpu_is_moved_before_a_division(monkeypatch):
    """CUDA multiplies by its reciprocal."""
    from simulated_device import CUDA, put

    moved = []
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: moved.append(device) or self)
    arithmetic.divide(put(draw(3)), torch.tensor(3.0))
    assert moved == [CUDA]


ONLY_CUDA = ["_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "_cudnn_rnn", "cudnn_convolution"]
ONLY_CUDA += ["_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention"]


@pytest.mark.parametrize("name", ONLY_CUDA)
def test_an_operation_that_only_cuda_has_is_refused(name):
    rule = PortableMode()._find(getattr(torch.ops.aten, name).default)
    with pytest.raises(NotPortableError, match=name):
        rule(torch.ones(2))


LIMIT = 2**31 - 1 - 4096  # beyond which a kernel counts in 64 bits


@pytest.mark.parametrize("rows", [LIMIT // 256, LIMIT // 64, LIMIT // 64 + 1, 2**26 + 5])
@pytest.mark.parametrize("name", ["add_blocks", "softmax", "exp"])
def test_each_block_touches_its_elements_at_any_size(name, rows):
    """Sums of rows of 64 elements, a softmax of them, a function: the first and the last blocks."""
    x, out = (torch.empty(shape, device="meta") for shape in ((rows, 64), rows))
    with recorded() as seen:
        if name == "add_blocks":
            triton_kernels.add(out, x, [(1, 0), (rows, 64)], [(1, 0), (64, 1)])
        else:
            getattr(triton_formulas, name)(torch.empty_like(x), x)
    ((one, named, blocks),) = seen
    reach = 4 * 64 * rows if name == "add_blocks" else 64 * rows  # bytes, to be safe
    assert one.constants["WIDE"] == (reach > LIMIT)
    count = 64 * rows if name == "exp" else rows
    width, each, last = 4 * 64 * rows // count, -(-count // blocks), 256 * rows
    sizes = (last, 4 * rows) if name == "add_blocks" else (last, last)
    for block in {0, blocks // 2, blocks - 1}:
        touched = run_block(one, named, block, blocks, sizes).touched
        first, end = each * block, min(each * (block + 1), count)
        assert touched[1] == (width * first, width * end - 1)
        width_out = 4 if name == "add_blocks" else width
        assert touched[2] == (width_out * first, width_out * end - 1)


@pytest.mark.parametrize("rows", [LIMIT, LIMIT + 1, 2**31 - 1])
def test_each_tile_of_a_product_reads_its_rows_at_any_size(rows):
    """The tables of offsets hold zeros."""
    columns, batch = 70, 2

    def make(*sizes):
        return Offsets(*(torch.empty(size, dtype=torch.int64, device="meta") for size in sizes))

    places = make(rows, 3, batch), make(3, columns, batch), make(rows, columns, batch)
    x = torch.empty(9, device="meta")
    with recorded() as seen:
        triton_kernels.multiply(x, x, x, *places)
    ((one, named, blocks),) = seen
    assert one.constants["WIDE"] == (rows > LIMIT)
    assert blocks == 2 * batch * -(-rows // 64)
    sizes = (*[36] * 3, *(8 * table.numel() for own in places for table in own))
    for block in (0, blocks // 2 - 1, blocks // 2, blocks - 1):
        touched = run_block(one, named, block, blocks, sizes).touched
        first = block // 2 % (blocks // 2 // batch) * 64
        assert touched[4] == touched[10] == (8 * first, 8 * min(first + 64, rows) - 1)
        number = block // (blocks // batch)
        assert touched[6] == touched[9] == touched[12] == (8 * number, 8 * number + 7)
