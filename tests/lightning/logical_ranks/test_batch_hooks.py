"""Hooks after a batch of an evaluation get plain values of all logical ranks."""

from types import SimpleNamespace

import pytest

from lightning_d9m.control.data.micro_batches import MicroBatches
from lightning_d9m.errors import SettingError
from lightning_d9m.lightning.logical_ranks.batch_hooks import BatchHooks


def test_outputs_that_cannot_be_sent_are_refused():
    hooks = BatchHooks(SimpleNamespace(world_size=1), gather=lambda plain: [plain])
    with pytest.raises(SettingError, match="and these cannot be sent: "):
        hooks._gather_all(MicroBatches([object()]), [1])
