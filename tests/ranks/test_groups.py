"""The bytes of all processes of a group arrive whole."""

import torch
from gloo_threads import run_processes

from lightning_d9m.ranks.groups import gather_bytes
from lightning_d9m.ranks.ranks import _FIRST_BYTES


def test_bytes_are_gathered_in_inference_mode():
    def gather(process, group):
        with torch.inference_mode():
            return gather_bytes(bytes([process]), group)

    assert run_processes(2, gather) == [[b"\0", b"\1"]] * 2


def test_bytes_of_any_length_arrive():
    for length in (0, 1, _FIRST_BYTES - 8, _FIRST_BYTES - 7, 10**5):
        parts = [b"a" * length, b"b" * (length // 2)]
        assert run_processes(2, lambda p, group, s=parts: gather_bytes(s[p], group)) == [parts] * 2
