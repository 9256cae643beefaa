"""The page of the Python API has every public name."""

import re
from inspect import isclass
from pathlib import Path

import lightning_d9m
from lightning_d9m.errors import D9mError

PAGE = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()


def test_the_page_has_every_public_name():
    shown = set(re.findall(r"^::: lightning_d9m\.(\w+)$", PAGE, re.MULTILINE))
    errors = {
        name
        for name in lightning_d9m.__all__
        if isclass(value := getattr(lightning_d9m, name)) and issubclass(value, D9mError)
    }
    assert shown == {*lightning_d9m.__all__, "errors"} - errors - {"__version__"}
