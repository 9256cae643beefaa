"""SHA-256 of values is that of hashlib over the bytes that docs/digest.md defines."""

import hashlib
import subprocess

import torch

from lightning_d9m.engine.hashing.sha256 import hash_named, hash_values


def test_a_tensor_is_hashed_with_its_header_in_row_major_order():
    header = b"d9m-digest-1 float32 [2,3]\n"
    x = torch.arange(6.0).reshape(3, 2).t()
    expected = hashlib.sha256(b"start" + header + x.contiguous().numpy().tobytes()).hexdigest()
    assert hash_values([x], "start") == expected


def test_types_shapes_and_bits_count():
    values = (
        *(1, 1.0, True, "1", None, [1], (1,), {"a": 1}, torch.ones(2), torch.ones(1, 2)),
        *(torch.zeros(1), -torch.zeros(1), torch.ones(2, dtype=torch.int32), torch.eye(2)),
        *(torch.eye(2).to_sparse(), torch.tensor(1j).conj(), torch.ones(2, dtype=torch.bfloat16)),
    )
    assert len({hash_values([value]) for value in values}) == len(values)
    assert hash_values([torch.ones(2), 1]) != hash_values([1, torch.ones(2)])


def test_of_an_object_without_bytes_the_type_counts():
    assert hash_values([object()]) == hash_values([object()]) != hash_values([lambda: 0])


def test_values_by_name_are_hashed_on_threads_in_any_order(monkeypatch):
    values = {"b": torch.arange(100.0), ("a", "c"): 1, "d": None, "e": torch.eye(3)}
    known = hash_values([{name: hash_values([value]) for name, value in values.items()}])
    for threads in (1, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)  # noqa: B023 - called here
        assert hash_named(values) == known
    assert hash_named(dict(reversed(values.items()))) == known
    assert hash_named({**values, "d": 0}) != known


def test_a_process_that_ends_starts_no_threads(forking_python):
    """A loop without a Recorder records its last state there."""
    code = "import atexit, torch; from lightning_d9m.engine.hashing.sha256 import hash_named\n"
    code += "torch.set_num_threads(2)\n"
    code += "atexit.register(lambda: print(hash_named({'a': 1, 'b': 2})))"
    done = subprocess.run([forking_python, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == hash_named({"a": 1, "b": 2})
