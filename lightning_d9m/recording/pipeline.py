"""Pipelines of ``torch.distributed.pipelining``: each rank trains other parts of a model."""

import gc
import sys

from torch import distributed, nn


def count_stages(model: nn.Module) -> int:
    """Return the number of stages of the pipeline that runs modules of a model; 0 without one.

    A stage holds its module, and a module does not know its stage, so that this looks through the
    objects of the process, if the program has imported pipelines and opened a process group, from
    which a stage takes its rank.
    """
    stages = sys.modules.get("torch.distributed.pipelining.stage")
    if stages is None or not distributed.is_initialized():
        return 0
    base = stages._PipelineStageBase  # noqa: SLF001 - of both kinds
    modules = set(map(id, model.modules()))
    return max(
        (
            stage.num_stages
            # An object refers to its class. The types of all objects are compared in three times
            # as long.
            for stage in gc.get_referrers(*_list_subclasses(base))
            if isinstance(stage, base) and not modules.isdisjoint(map(id, stage.submod.modules()))
        ),
        default=0,
    )


def _list_subclasses(base: type) -> set[type]:
    """Return a class and all that derive from it."""
    return {base}.union(*map(_list_subclasses, base.__subclasses__()))
