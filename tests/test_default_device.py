"""torch.set_default_device: nothing of the package is made on a device that it does not name."""

import ast
from pathlib import Path

import pytest
import torch
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


def find_makers(text: str) -> list[str]:
    """Return what makes a tensor and does not name its device, or is not called here."""
    tree = ast.parse(text)
    named = {
        id(call.func)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and "device" in [word.arg for word in call.keywords]
    }
    found = [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value) == "torch"
        and node.attr in MAKERS
        and id(node) not in named
    ]
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported = {name.name for node in imports if node.module == "torch" for name in node.names}
    return found + sorted(imported & MAKERS)


def test_every_tensor_that_the_package_makes_has_a_named_device() -> None:
    found = {
        (file.name, name)
        for file in PACKAGE.rglob("*.py")
        for name in find_makers(file.read_text())
    }
    assert found == OF_THE_PROGRAM


@pytest.mark.parametrize(
    "line", ["torch.zeros(3, dtype=torch.int64)", "make = torch.zeros", "from torch import zeros"]
)
def test_a_maker_without_a_device_is_found(line: str) -> None:
    assert find_makers(line) == ["zeros"]
    assert find_makers("torch.zeros(3, device=place)") == []


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
