"""The compiled kernels give the bits of their text, which torch ops run."""

import os
import signal
import subprocess
import warnings
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from unittest.mock import Mock, patch

import pytest
import torch
from formula_values import compute_formula
from kernel_inputs import draw, make_numbers, make_rows, read_bits

from lightning_d9m import portable
from lightning_d9m.errors import NotPortableError, SettingError
from lightning_d9m.ops.patches.kernels.updates import update_rows
from lightning_d9m.ops.patches.triton import language
from lightning_d9m.ops.portability import compiler, kernels, library
from lightning_d9m.ops.portability.arithmetic import add_running
from lightning_d9m.ops.portability.formulas import FUNCTIONS, KERNELS

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def compare(found, expected):
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert read_bits(found) == read_bits(expected)


@contextmanager
def by_torch():
    """Let torch ops run the text of the kernels, as without a compiler."""
    with patch.object(kernels, "find_kernel", lambda *_: None):
        yield


@pytest.fixture(params=[1, 2], autouse=True)
def _threads(request, monkeypatch, set_threads):
    """Two threads share out also what one would compute sooner."""
    monkeypatch.setattr(library, "_ALONE", 0)
    set_threads(request.param)


@DTYPES
@pytest.mark.parametrize(
    "sizes", [(1, 7, 5, 13), (2, 33, 300, 70), (1, 60, 3, 2), (2, 6, 4, 1), (1, 1, 600, 40)]
)
def test_products(sizes, dtype):
    batch, rows, terms, columns = sizes
    left = draw(batch, rows, terms, dtype=dtype)
    right = draw(batch, terms, columns, dtype=dtype, seed=1)
    with by_torch():
        expected = kernels.multiply(left, right)
    compare(kernels.multiply(left, right), expected)
    turned = [one.mT.contiguous().mT for one in (left, right)]
    compare(kernels.multiply(*turned), expected)
    # Not torch's float32 product: where terms cancel, its error and ours differ by processor.
    wide = left.double(), right.double()
    sizes = wide[0].abs() @ wide[1].abs()
    errors = (expected.double() - wide[0] @ wide[1]).abs()
    assert bool((errors <= 4 * torch.finfo(dtype).eps * sizes).all())


def test_one_rounding_of_a_product_and_a_sum():
    """Where float64 rounds to the middle between two float32 numbers, and where a sum is lost."""
    a, b = torch.tensor([1 + 2.0**-23, 3.0, 2.0**-100]), torch.tensor([1 + 2.0**-23, 5.0, 2.0**-40])
    c = torch.tensor([2.0**-75, -15.0, 2.0**-149])
    found = language.fma(a, b, c).tolist()
    assert found == [1 + 2.0**-22, 0.0, 2.0**-140 + 2.0**-149]
    product = kernels.multiply(
        torch.stack([a, b], 1).unsqueeze(1), torch.stack([b, a], 1)[..., None]
    )
    compare(product[:, 0, 0], language.fma(b, a, a * b))


@DTYPES
@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        *[((5, 7), (1,)), ((300, 70), (0,)), ((9000,), (0,)), ((4, 20, 9, 9), (0, 2, 3)), ((), ())],
        *[((3, 5000, 20), (1,)), ((2, 3, 4, 5, 6), (1, 3)), ((6, 5000), (1,)), ((3, 1, 40), (1,))],
    ],
)
def test_sums(shape, dims, dtype):
    x = draw(*shape, dtype=dtype)
    with by_torch():
        expected = kernels.add(x, dims)
    compare(kernels.add(x, dims), expected)
    if shape:
        turned = x.transpose(0, -1).contiguous().transpose(0, -1)
        compare(kernels.add(turned, dims), expected)


@DTYPES
@pytest.mark.parametrize(("rows", "width"), [(50, 1), (50, 3), (9000, 2)])
def test_sums_at_places(rows, width, dtype):
    """Of what is there, too: each of two threads adds to its own places."""
    terms, places = draw(3000, width, dtype=dtype).pow(9), torch.randint(50, (3000,))
    found, expected = (draw(rows, width, dtype=dtype, seed=1) for _ in range(2))
    update_rows(found, places, terms, "sum")
    with by_torch():
        update_rows(expected, places, terms, "sum")
    compare(found, expected)


@DTYPES
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name, dtype):
    check_kernel(name, **make_numbers(name, 2000, dtype))


def check_kernel(name, **given):
    """Compute a kernel by C, by its text and by its formula, and compare what it writes."""
    others = {k: one.clone() if isinstance(one, torch.Tensor) else one for k, one in given.items()}
    present = {k: one for k, one in others.items() if one is not None}
    kernel = KERNELS["_without_".join((name, *(k for k in given if given[k] is None)))]
    like = next(one for one in present.values() if isinstance(one, torch.Tensor))
    values = compute_formula(kernel, like, present)
    found = kernels.compute(name, **given)
    for key, own in zip(kernel.fresh, found, strict=True):
        compare(own, values[key].view(own.shape))
    for key in values.keys() & given.keys():
        compare(given[key], values[key].view(given[key].shape))
    with by_torch():
        expected = kernels.compute(name, **others)
    for pair in zip(found, expected, strict=True):
        compare(*pair)
    for k, one in others.items():
        if isinstance(one, torch.Tensor):
            compare(given[k], one)


@DTYPES
@pytest.mark.parametrize("name", sorted(KERNELS.keys() - FUNCTIONS.keys()))
def test_kernels_of_rows_and_elements(name, dtype):
    """With and without each input that may be None; numbers are 0 and 1, too."""
    for turn in range(3):
        check_kernel(name.partition("_without_")[0], **make_rows(name, 30, 300, dtype, turn))


def test_a_kernel_reads_numbers_of_its_type():
    """Torch saves the statistics of a batch of 16 bits with 16 bits."""
    x, means = draw(6, 300, dtype=torch.float32), draw(3, dtype=torch.bfloat16)
    narrow, wide = (kernels.compute("deviations", x=x, means=m)[0] for m in (means, means.float()))
    compare(narrow, wide)


def test_running_sums():
    """Torch adds in order on the CPU, and begins with 0."""
    x = draw(6, 5, 300, dtype=torch.float64)
    x[0] = x[:, 0] = x[..., 0] = -0.0
    for dim in range(3):
        compare(x.cumsum(dim), add_running(x, dim))


@DTYPES
@pytest.mark.parametrize("count", [1, 31, 64, 1000])
def test_random_numbers(count, dtype):
    key = 0x123456789ABCDEF
    found = kernels.draw(key, (count,), dtype)
    compare(found, kernels.define_draws(key, count, dtype))
    assert bool(((found >= 0) & (found < 1)).all())


def test_philox_is_that_of_its_authors():
    """The first known answer of Random123: counter 0, key 0."""
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    found = kernels.define_draws(0, 64, torch.float32)[::16]
    assert (found * 2.0**24).tolist() == [word >> 8 for word in words]


def forget():
    """Look for the library again."""
    library.load.cache_clear()
    library._find.cache_clear()


def test_torch_operations_serve_without_a_compiler(monkeypatch, tmp_path):
    values = draw(50, 60, dtype=torch.float32)
    expected = kernels.add(values, [0]), kernels.multiply(values[None], values.mT[None])
    monkeypatch.setenv("CC", "/bin/false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    with pytest.warns(UserWarning, match="cannot be compiled"):
        found = kernels.add(values, [0])
    with warnings.catch_warnings():  # once
        warnings.simplefilter("error")
        product = kernels.multiply(values[None], values.mT[None])
    forget()
    compare(found, expected[0])
    compare(product, expected[1])


@pytest.mark.parametrize("width", compiler.list_widths())
def test_each_width_compiles_once(width, tmp_path, monkeypatch):
    """Without a warning; without optimization, which would take seconds."""
    monkeypatch.setattr(compiler, "_FLAGS", compiler._FLAGS.replace("-O3", "-O0 -Wall -Werror"))
    path = compiler.build(width, tmp_path)
    assert [*tmp_path.iterdir()] == [path]
    monkeypatch.setenv("CC", "/bin/false")
    with pytest.raises(subprocess.CalledProcessError):
        compiler.build(width, tmp_path)


def test_kernels_that_a_compiler_changed_are_refused(tmp_path, monkeypatch):
    flags = compiler._FLAGS.replace("-O3", "-O1 -fassociative-math -fno-signed-zeros")
    monkeypatch.setattr(compiler, "_FLAGS", flags)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.load.cache_clear()
    with pytest.raises(NotPortableError, match="order or the number of roundings"):
        library.load()
    library.load.cache_clear()


def test_a_fork_computes_on_one_thread():
    """OpenMP would wait for the threads of the parent."""
    values = draw(1, 90, 90, dtype=torch.float32)
    torch.ones(2**17).mul_(2)
    expected = kernels.multiply(values, values).numpy().tobytes()
    child = os.fork()
    if not child:
        signal.alarm(20)
        with portable():
            os._exit(kernels.multiply(values, values).numpy().tobytes() != expected)
    assert os.waitpid(child, 0)[1] == 0


def test_flushed_subnormal_numbers_are_refused():
    """The kernels do not flush, whatever the thread does, and leave its state."""
    values = torch.full((4000,), 2.0**-126)
    assert torch.set_flush_denormal(True)
    try:
        with pytest.raises(SettingError, match="flushes subnormal numbers"), portable():
            pass
        halves = kernels.multiply(values.view(1, -1, 1), torch.full((1, 1, 9), 0.5))
        flushed = values * 0.5
    finally:
        torch.set_flush_denormal(False)
    assert halves.all()
    assert not flushed.any()


def test_flushing_is_seen_while_bits_are_portable():
    """When torch is asked to, and at the end of a block, where something else did."""
    flush = torch.set_flush_denormal
    with portable(), pytest.raises(SettingError, match="flushes subnormal numbers"):
        torch.set_flush_denormal(True)
    try:
        with pytest.raises(SettingError, match="flushes subnormal numbers"), portable():
            flush(True)
    finally:
        flush(False)
    assert torch.set_flush_denormal is flush


def test_no_folder_is_needed_for_torch_operations(monkeypatch):
    """As of a user without a home."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(library.Path, "home", Mock(side_effect=RuntimeError("no home")))
    forget()
    with pytest.warns(UserWarning, match="no home"):
        assert library.load() is None
    forget()


def test_a_thread_that_ends_frees_its_memory():
    """A product packs its matrices into memory that the thread keeps, more than 1 MiB."""

    def grow(count):
        for _ in range(count):
            thread = Thread(target=kernels.multiply, args=(values[:, :8], values.mT))
            thread.start()
            thread.join()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    values = draw(1, 1200, 300, dtype=torch.float32)
    assert -grow(20) + grow(60) < 20 * 2**20  # the first 20 begin


PROGRAM = """
import torch
from lightning_d9m import portable
torch.set_num_threads(2)
torch.set_flush_denormal(True)
torch.ones(2**17).mul_(2)
torch.set_flush_denormal(False)
with portable():
    pass
"""


def test_a_second_thread_that_flushes_is_seen(forking_python):
    """It began while the first one flushed, and keeps that state."""
    done = subprocess.run(
        [forking_python, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert "A thread of torch flushes subnormal numbers" in done.stderr
