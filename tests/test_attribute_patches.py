"""Attributes of objects and of classes are replaced and restored."""

import pytest

from lightning_d9m.attribute_patches import AttributePatches


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
