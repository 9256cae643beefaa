"""The part of a training state that must be equal on all ranks."""

import gc
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import distributed, nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _NormBase
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_d9m.hashing.shards import FlatLayout, has_base, may_be_sharded
from lightning_d9m.hashing.training_state import Groups, count_sharded, plain_name, replicated_names
from lightning_d9m.ledger.format.records import Scalar
from lightning_d9m.ledger.stack import PIPELINE_STAGES, SHARDED_PARAMETERS


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


# Each rank holds the state of a part of the parameters.
_SHARDED_OPTIMIZERS = ("ZeroRedundancyOptimizer", "OSS")
# LBFGS keeps the loss of each rank's own batch.
_LOCAL_STATE = frozenset({"prev_loss"})


@dataclass(frozen=True, kw_only=True)
class ReplicatedState:
    """Names of the state that must be equal on all ranks.

    Attributes:
        weights: Parameters whose digest is that of the whole parameter.
        synchronized: Buffers that every rank computes from the data of all ranks.
        local: Buffers that each rank computes from its own data.
        sharded_optimizers: Numbers of optimizers whose per-parameter state is not compared.
        metric_schedulers: Numbers of schedulers that follow a metric, which may be a rank's own.
    """

    weights: Collection[str] = ()
    synchronized: Collection[str] = ()
    local: Collection[str] = ()
    sharded_optimizers: Collection[int] = ()
    metric_schedulers: Collection[int] = ()

    def select(self, groups: Mapping[str, Mapping[str, str]]) -> Groups:
        """Return the digests that must be equal, by group, names sorted."""
        takes = {
            "weights": frozenset(self.weights).__contains__,
            "buffers": frozenset(self.synchronized).__contains__,
            "optimizers": self._is_replicated,
            "schedulers": lambda name: int(name) not in self.metric_schedulers,
        }
        return {
            group: {name: groups[group][name] for name in sorted(filter(take, groups[group]))}
            for group, take in takes.items()
            if group in groups
        }

    def select_buffers(self, groups: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
        """Return the digests of the buffers that may be equal: ``RankAgreement`` decides."""
        excluded = {*self.synchronized, *self.local}
        buffers = groups.get("buffers", {})
        return {name: buffers[name] for name in sorted(buffers.keys() - excluded)}

    def _is_replicated(self, entry: str) -> bool:
        """Return whether an entry ``0.group.1`` or ``0.exp_avg.layer.weight`` must be equal."""
        number, key, name = entry.split(".", 2)
        if key == "group":
            return True
        sharded = int(number) in self.sharded_optimizers
        return not sharded and key not in _LOCAL_STATE and name in self.weights


def describe_division(model: nn.Module, layouts: Mapping[int, FlatLayout]) -> dict[str, Scalar]:
    """Return what the stack says of a model of which ranks hold different parts."""
    if not may_be_sharded():
        return {}
    counts = {
        SHARDED_PARAMETERS: count_sharded(model, layouts),
        PIPELINE_STAGES: count_stages(model),
    }
    return {name: count for name, count in counts.items() if count}


def find_replicated_state(
    model: nn.Module,
    optimizers: Sequence[Optimizer] = (),
    schedulers: Sequence[object] = (),
    *,
    layouts: Mapping[int, FlatLayout] | None = None,
) -> ReplicatedState | None:
    """Return what must be equal on all ranks; None if each trains another stage of a pipeline.

    The model is as the user's optimizers see it; optimizers and schedulers are in the order of
    the snapshot.
    """
    if count_stages(model):
        return None
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    synchronized: set[str] = set()
    local: set[str] = {plain_name(name) for name, _ in model.named_buffers() if name in ignored}
    for path, module in model.named_modules():
        if not isinstance(module, _NormBase):
            continue
        names = (f"{path}.{name}" if path else name for name, _ in module.named_buffers())
        own = synchronized if isinstance(module, SyncBatchNorm) else local
        own.update(map(plain_name, names))
    weights = [name for name in replicated_names(model, layouts) if name not in ignored]
    return ReplicatedState(
        weights=frozenset(weights),
        synchronized=synchronized - local,
        local=local,
        sharded_optimizers=frozenset(
            number
            for number, optimizer in enumerate(optimizers)
            if has_base(optimizer, *_SHARDED_OPTIMIZERS)
        ),
        metric_schedulers=frozenset(
            number
            for number, scheduler in enumerate(schedulers)
            if isinstance(scheduler, ReduceLROnPlateau)
        ),
    )
