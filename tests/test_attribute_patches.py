"""Attributes of objects and of classes are replaced and restored."""

import gc
from contextlib import ExitStack

import pytest
import torch

from lightning_d9m.attribute_patches import AttributePatches, replace_method
from lightning_d9m.errors import HookMissingError


class Base:
    inherited = 1


class Kind(Base):
    own = 2


@pytest.mark.parametrize("owner", [Kind(), Kind], ids=["object", "class"])
@pytest.mark.parametrize("name", ["inherited", "own"])
def test_what_is_replaced_twice_is_as_before_once_it_is_restored(owner, name):
    before, value = dict(vars(owner)), getattr(owner, name)
    patches = AttributePatches()
    for new in (3, 4):
        patches.replace(owner, name, new)
        assert getattr(owner, name) == new
    patches.undo()
    assert getattr(owner, name) == value
    assert dict(vars(owner)) == before


@pytest.mark.parametrize("owner", [torch, torch.nn.Linear, torch.nn.Linear(1, 1)], ids=type)
def test_a_name_that_the_owner_lacks_is_not_replaced(owner):
    with pytest.raises(HookMissingError, match=r"lacks torch\..*_gone"):
        AttributePatches().replace(owner, "_gone", 1)
    assert not hasattr(owner, "_gone")


def test_an_owner_that_refuses_keeps_what_it_has():
    class Fixed:
        own = property(lambda _: 2)

    owner, patches = Fixed(), AttributePatches()
    with pytest.raises(AttributeError):
        patches.replace(owner, "own", 3)
    patches.undo()
    assert owner.own == 2


def test_a_body_that_raises_restores_and_a_dead_owner_is_passed_over():
    owner, patches = Kind(), AttributePatches()
    with pytest.raises(KeyError), ExitStack() as stack:
        replace_method(stack, owner, "own", lambda: 3)
        raise KeyError
    assert vars(owner) == {}
    patches.replace(owner, "own", 3)
    assert patches.read_original(owner, "own") == 2
    del owner
    gc.collect()
    patches.undo()
