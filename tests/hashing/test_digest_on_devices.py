"""Digests of a device's streams, on a simulated device that runs each stream only when it must."""

import pytest
import torch
from simulated_device import LikeCuda, Stream, device, put, simulate

from lightning_d9m.engine.hashing import digest as digest_module
from lightning_d9m.engine.hashing.digest import DigestQueue, digest_many, digest_value
from lightning_d9m.engine.probes.trace import Trace, name_leaves


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    """Let the queue launch on the simulated device."""
    return simulate(monkeypatch)


@pytest.mark.parametrize("copied", [False, True])
def test_tensors_of_several_streams_are_each_read_on_their_stream(copied):
    """Nothing waits for a stream but the host: no digest is taken of what is not yet there."""
    values = [torch.randn(n) for n in (3, 50_000, 7, 0, 10)]
    streams = [Stream(), Stream()]
    queue = DigestQueue()
    for number, value in enumerate(values):
        there = put(torch.zeros_like(value))
        stream = streams[number % 2]
        stream.work.append(lambda there=there, value=value: there.copy_(value))
        with device.on(stream):
            queue.add([there])
        assert there.streams == (stream,)
    if copied:
        queue.start_copies()
    assert queue.fetch() == digest_many(values)


def test_what_is_overwritten_later_has_the_digest_of_before():
    value = torch.randn(10)
    there = put(value)
    queue = DigestQueue()
    queue.add([there])
    device.current.work.append(there.zero_)
    queue.start_copies()
    assert queue.fetch() == digest_many([value])


def test_the_leaves_of_a_value_are_read_in_one_launch():
    """And in their order, with digests of other leaves between them."""
    values = [torch.randn(n) for n in (4, 0, 40_000)]
    trace, alone = Trace(), Trace()
    mixed = [values[0], 7, {"a": values[1], "b": "text"}, values[2]]
    alone.add_leaves("input", name_leaves("module", mixed))
    there = [put(value) for value in values]
    on_device = [there[0], 7, {"a": there[1], "b": "text"}, there[2]]
    trace.add_leaves("input", name_leaves("module", on_device))
    assert [count for _, count in device.launches] == [3]
    trace.queue.start_copies()
    assert trace.queue.fetch() == alone.queue.fetch()
    assert trace.places == alone.places


def test_tensors_of_the_host_and_of_a_device_are_digested_together():
    values = [torch.randn(n) for n in (3, 70_000, 0, 5)]
    mixed = [put(values[0]), values[1], put(values[2]), values[3]]
    assert digest_many(mixed) == digest_many(values)
    assert digest_value(mixed) == digest_value(values)


@pytest.mark.parametrize("begin", [1, 2, 4, 5])
def test_a_tensor_that_the_kernel_cannot_read_in_place_is_copied(monkeypatch, begin):
    start, launches = device.start_hashing, []

    def start_and_wait(memory, own):
        launches.append([address % 16 for address, _ in memory])
        found = start(memory, own)
        device.current.run()  # a device's allocator keeps the copy until then
        return found

    monkeypatch.setattr(device, "start_hashing", start_and_wait)
    copy = digest_module._copy
    monkeypatch.setattr(digest_module, "_copy", lambda tensor: put(copy(tensor)))
    values = [torch.arange(10.0)[begin:], torch.ones(3), torch.arange(9, dtype=torch.uint8)[begin:]]
    assert digest_many(value.as_subclass(LikeCuda) for value in values) == digest_many(values)
    assert launches == ([[0, 0], [0]] if begin == 4 else [[0]] * 3)
