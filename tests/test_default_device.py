"""torch.set_default_device: nothing of the package is made on a device that it does not name."""

import ast
from pathlib import Path
from types import FunctionType

import pytest
import torch
from default_device import PackageDefault
from torch.utils import _device
from torch.utils.data import DataLoader

import lightning_d9m
from lightning_d9m.engine.control.data import loaders
from lightning_d9m.engine.hashing.digest import digest_value

PACKAGE = Path(lightning_d9m.__file__).parent
# What the default device decides; as_tensor leaves tensors where they are.
MAKERS = {made.__name__ for made in _device._device_constructors()} - {"as_tensor", "asarray"}
# Stand for operations of the program, whose default device counts.
OF_THE_PROGRAM = {("arithmetic.py", "arange")}


def find_calls(text: str) -> list[str]:
    """Return the calls that make a tensor and do not name its device."""
    return [
        call.func.attr
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and ast.unparse(call.func.value) == "torch"
        and call.func.attr in MAKERS
        and "device" not in [word.arg for word in call.keywords]
    ]


def test_every_tensor_that_the_package_makes_has_a_named_device() -> None:
    found = {
        (file.name, name) for file in PACKAGE.rglob("*.py") for name in find_calls(file.read_text())
    }
    assert found == OF_THE_PROGRAM
    assert find_calls("torch.zeros(3, dtype=torch.int64)") == ["zeros"]


def test_all_trainings_have_a_default_device_that_the_package_alone_sees() -> None:
    """By a fixture of tests/lightning: what the package makes without a device has no values."""
    code, names = compile("made = torch.zeros(3)", PACKAGE / "a.py", "exec"), {"torch": torch}
    with PackageDefault():
        FunctionType(code, names)()
        assert torch.zeros(3).device.type == "cpu"
    assert names["made"].device.type == "meta"


def test_a_loader_draws_its_seed_on_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator of another device would be refused there."""
    made = []
    real = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda *given: made.append(given) or real())
    monkeypatch.setattr(torch, "get_default_device", lambda: torch.device("cuda", 0))
    control = loaders.LoaderControl(1, fit=0, rank=0, per_sample_rng=False)
    try:
        control.wrap_loader(DataLoader([1, 2]), "train")
    finally:
        control.release()
    assert (torch.device("cuda", 0),) in made


def test_a_value_is_digested_under_any_default_device() -> None:
    expected = digest_value({"a": 1.5, "b": [torch.ones(3)]})
    given = {"a": 1.5, "b": [torch.ones(3)]}
    with torch.device("meta"):
        assert digest_value(given) == expected
