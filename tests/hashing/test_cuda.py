"""The digest on a CUDA device: equal to the CPU's, without bringing the data back."""

import json
import warnings

import pytest
import torch

from lightning_d9m.engine.hashing import digest as digest_module
from lightning_d9m.engine.hashing.digest import DigestQueue, digest, digest_many, digest_value

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:ComplexHalf"),
]

CHUNK = 131072
QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
DTYPES = sorted(
    {v for v in vars(torch).values() if isinstance(v, torch.dtype)} - QUANTIZED, key=str
)
SIZES = [0, 1, 15, 1023, 1024, 1025, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 1025, 300 * CHUNK + 7]


@pytest.fixture(scope="module")
def noise():
    """Return 20 MB of random bytes, on the CPU and on the device."""
    data = torch.randint(256, (301 * CHUNK,), dtype=torch.uint8)
    return data, data.cuda()


def test_kernel_is_in_use():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert digest_module.load_kernel(torch.device("cuda", 0)) is not None


@pytest.mark.parametrize("with_kernel", [True, False])
@pytest.mark.parametrize("begin", [0, 1, 2, 4, 8, 15])
def test_every_size_and_alignment_agrees_with_the_cpu(noise, monkeypatch, begin, with_kernel):
    here, there = ([data[begin : begin + size] for size in SIZES] for data in noise)
    expected = digest_many(here)
    if not with_kernel:
        monkeypatch.setattr(digest_module, "load_kernel", lambda device: None)
    assert digest_many(there) == expected


def test_every_dtype_and_layout_agrees_with_the_cpu(noise):
    def view_as(data, dtype):
        matrix = data[: 4096 * dtype.itemsize].view(dtype).reshape(64, 64)
        return matrix, matrix.t(), matrix[3:, 5]

    here, there = ([one for dtype in DTYPES for one in view_as(data, dtype)] for data in noise)
    numbers = torch.randn(8, 3, 4, 4, dtype=torch.complex64)
    tensors = [
        numbers.conj(),
        numbers.conj().imag,
        numbers.real.to(memory_format=torch.channels_last),
        torch.randn(5, 1).expand(5, 7),
        torch.eye(30).to_sparse(),
        torch.nn.Parameter(torch.randn(3)),
        torch.randn(()),
    ]
    copies = [tensor.cuda() for tensor in tensors]
    assert digest_many(there + copies) == digest_many(here + tensors)
    both = [tensors[-1], copies[-1]]
    assert digest_value(both) == digest_value(both[::-1])


def test_tensors_beyond_two_gigabytes_agree_with_the_cpu():
    size = 2**32 + 3 * CHUNK + 5
    if torch.cuda.mem_get_info()[0] < 2 * size:
        pytest.skip("needs 9 GB of free device memory")
    there = torch.zeros(size, dtype=torch.uint8, device="cuda")
    for position in (2**31 - 1, 2**31, 2**32 - 1, 2**32, size - 1):
        there[position] = position % 251 + 1
    assert digest(there) == digest(there.cpu())
    assert digest(there[3:]) == digest(there[3:].cpu())


def test_data_stay_on_the_device(noise, tmp_path):
    _, there = noise
    digest(there)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        digest(there)
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    copies = [event["args"]["bytes"] for event in events if "Memcpy DtoH" in event.get("name", "")]
    assert copies == [301 * 8]


def test_many_tensors_cost_one_synchronisation():
    tensors = [torch.randn(1000, device="cuda") for _ in range(1000)]
    digest_many(tensors[:1])
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            there = digest_many(tensors)
        finally:
            torch.cuda.set_sync_debug_mode(before)
    # The wait for the event of the copy is not counted.
    assert not [found for found in caught if "synchronizing CUDA operation" in str(found.message)]
    assert there == digest_many([tensor.cpu() for tensor in tensors])


def test_a_queue_reads_tensors_of_several_streams():
    """The results are fetched from another stream than those that compute them."""
    queue = DigestQueue()
    streams = [torch.cuda.Stream() for _ in range(3)]
    tensors = [torch.zeros(100_000, device="cuda") for _ in streams]
    torch.cuda.synchronize()
    for number, (stream, tensor) in enumerate(zip(streams, tensors, strict=True)):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            tensor.fill_(number)
            queue.add([tensor])
    queue.start_copies()
    assert queue.fetch() == [digest(torch.full((100_000,), float(n))) for n in range(3)]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_every_device_is_used_and_none_is_left_selected():
    tensors = [torch.randn(100_000) for _ in range(4)]
    there = [tensor.cuda(index % 2) for index, tensor in enumerate(tensors)]
    with torch.cuda.device(0):
        assert digest_many(there) == digest_many(tensors)
        assert torch.cuda.current_device() == 0
