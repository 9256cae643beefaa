"""Gradients and buffers of ranks that have shards."""

from types import SimpleNamespace

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_d9m.engine.hashing.training_state import ModelTensors
from lightning_d9m.integrations.lightning.resume.optimizers import Buffers, Gradients


def test_a_gradient_that_is_a_partial_sum_is_unknown():
    """As of a module under SequenceParallel: each rank would step with its part."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh, module = init_device_mesh("cpu", (2,)), torch.nn.Module()
        module.automatic_optimization = False
        for name, place in (("partial", Partial()), ("whole", Replicate())):
            weight = torch.nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Replicate()]))
            weight.grad = DTensor.from_local(torch.ones(3), mesh, [place])
            module.register_parameter(name, weight)
        trainer = SimpleNamespace(lightning_module=module, strategy=None)
        fit = SimpleNamespace(trainer=trainer, unknown=[])
        kept = Gradients(fit).capture("batch")
    finally:
        distributed.destroy_process_group()
    assert (list(kept), fit.unknown) == (["whole"], ["model.partial.grad"])


def test_each_rank_of_a_sharded_model_keeps_its_own_buffers():
    """Rank 0 too: any rank may be the one whose buffer a sharded checkpoint holds."""
    module = LightningModule()
    module.register_buffer("seen", torch.zeros(2))
    words = {"strategy": ModelParallelStrategy(), "world_size": 2, "is_global_zero": True}
    trainer = SimpleNamespace(lightning_module=module, **words)
    part = Buffers(SimpleNamespace(trainer=trainer, tensors=ModelTensors(module), has_begun=True))
    part.begin()
    module.seen += 1
    captured = part.capture("batch")
    module.seen.zero_()
    part.restore(captured, "train")
    assert module.seen.tolist() == [1, 1]
