"""Joined numbers load as the same tensors, from fewer entries of a file."""

import io
import zipfile

import torch

from lightning_d9m.hashing.digest import digest
from lightning_d9m.lightning.resume.joined_tensors import join_tensors

NAN = torch.tensor([0x7FC00001, 0x7F800001, -0x80000000], dtype=torch.int32).view(torch.float32)
VALUE = {
    "numbers": [torch.tensor(1.5), {"count": torch.tensor(3)}, (torch.tensor(-0.0), 2, "x")],
    "nan": [NAN[number] for number in range(3)],
    "bits": {
        "ones": torch.ones(1, 1),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "bool": torch.tensor(True),
    },
    "empty": [torch.ones(0), torch.ones(0, 3), [], {}],
    "shaped": torch.arange(6).reshape(2, 3).T,
    "large": torch.zeros(20000, dtype=torch.float64),
    "other": [torch.ones(2, dtype=torch.complex64).conj(), torch.eye(2).to_sparse()],
    "state": torch.Generator().get_state(),
}


def describe(value):
    if isinstance(value, dict):
        return {key: describe(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(describe(entry) for entry in value)
    return digest(value) if isinstance(value, torch.Tensor) else value


def test_joined_tensors_load_as_the_same_tensors():
    expected = describe(VALUE)
    joined = join_tensors(VALUE)
    file = io.BytesIO()
    torch.save(joined, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert describe(joined) == describe(loaded) == expected
    for name in ("large", "state", "shaped"):
        assert joined[name] is VALUE[name]
    assert torch.Generator().set_state(loaded["state"]).initial_seed()
    loaded["numbers"][0].add_(1)  # changes no neighbor
    loaded["numbers"][0].sub_(1)
    assert describe(loaded) == expected


def test_a_file_has_one_entry_for_the_numbers_of_a_dtype():
    numbers = {str(number): torch.tensor(float(number)) for number in range(50)}
    counts = {}
    for name, value in (("joined", join_tensors(numbers)), ("apart", numbers)):
        file = io.BytesIO()
        torch.save(value, file)
        names = zipfile.ZipFile(file).namelist()
        counts[name] = sum("/data/" in entry for entry in names)
    assert counts == {"joined": 1, "apart": 50}


def test_values_without_tensors_are_kept():
    assert join_tensors({"a": [1, (2.0, None)], "b": {}}) == {"a": [1, (2.0, None)], "b": {}}
