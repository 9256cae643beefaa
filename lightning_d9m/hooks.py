"""The table of private and replaced names of other libraries on which this package rests.

A session checks the rows of the libraries that are loaded before it changes anything, and
`AttributePatches.replace` refuses a name that its owner lacks.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

from lightning_d9m.errors import HookMissingError
from lightning_d9m.version import parse_release

# The releases with which the test suite ran: benchmarks/results/stacks.md.
TESTED = {
    "torch": ("2.4", "2.15"),
    "lightning": ("2.2", "2.6"),
}
# Either package of Lightning may be installed, and both may be loaded. The table has the first.
_PACKAGES = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}


class Hook(NamedTuple):
    """A name of another library that is private, or that this package replaces.

    Attributes:
        module: The module of the owner.
        owner: The class in it, with dots; empty if the module itself has the name.
        name: The name.
        purpose: What does not work without it.
        since: The first release of the library that has the name; empty for all that are supported.
    """

    module: str
    owner: str
    name: str
    purpose: str
    since: str

    @property
    def library(self) -> str:
        """The package that has it."""
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return ".".join(filter(None, (self.module, self.owner, self.name)))


# A release of torch, Lightning or torchmetrics may rename what is private. A renamed name does not
# always fail: a method that is set under its old name is never called, and the training has
# different bits. So every such name has a row here. It is a text, so that a row takes one line.
#
# Module and class, and below them: names, what this package does with them, and the first release
# that is known to have them if the oldest supported one lacks them.
_TABLE = """
torch.utils.data.dataloader:DataLoader
    _get_iterator _iterator | seed a loader
torch.utils.data.dataloader:_MultiProcessingDataLoaderIter
    _shutdown_workers | end the workers of a loader
torch.utils.data.dataloader:_BaseDataLoaderIter
    _next_data | load a batch on one thread
torch:Tensor
    _version _indices _values | see that a tensor changed
    _backward_hooks _post_accumulate_grad_hooks | list hooks
    _is_zerotensor | digest a tensor
torch
    _mkldnn _debug_has_internal_overlap _ctc_loss _foreach_add_ | patch operations
    _validate_sparse_coo_tensor_args | run operations again
torch.random
    _seed_custom_device | note seeds
torch._C
    DisableTorchFunctionSubclass DispatchKey _get_tracing_state | patch and probe operations
    _current_autograd_node _nn | patch and probe operations
    _dispatch_get_all_op_names | register patches, and list collectives
    _dispatch_has_kernel_for_dispatch_key | register patches, and list collectives
    _dispatch_has_kernel _AutoDispatchBelowAutograd | run operations again
    _overlaps | patch operations | 2.11
    _set_deterministic_algorithms | let named operations vary, and compute portable bits
    _get_cudnn_enabled _set_cudnn_enabled _get_mkldnn_enabled | compute portable bits
    _set_mkldnn_enabled | compute portable bits
    _SetExcludeDispatchKeyGuard _DisableTorchDispatch | compute portable bits
torch._C._distributed_c10d:Backend.Options
    _timeout | wait for another process | 2.6
torch._C._autograd
    _get_sequence_nr | probe a backward pass
torch._C:Future
    wait value then | probe what arrives later
torch.autograd.graph
    _engine_run_backward | probe a backward pass
torch.autograd.graph:Node
    _sequence_nr | probe a backward pass | 2.11
torch._ops:OpOverload
    _schema _overloadname _op _op_dk | name an operation
torch._ops:OpOverloadPacket
    _op | refuse a collective
torch.library:Library
    _destroy | remove a patch
torch.nn.modules.module:Module
    _parameters _buffers _modules | read a model
    _non_persistent_buffers_set _compiled_call_impl | read a model
torch._dynamo.eval_frame:OptimizedModule
    _orig_mod | name a compiled module
torch.amp.grad_scaler:GradScaler
    _get_scale_async | probe a loss scale
torch.optim.optimizer
    _get_foreach_kernels_supported_devices | choose one formula for optimizers
torch.optim.adagrad
    adagrad | compute portable steps
torch.optim.adam
    adam | compute portable steps
torch.optim.adamw
    adamw | compute portable steps
torch.optim.sgd
    sgd | compute portable steps
torch._decomp.decompositions
    _upsample_linear_vec _replication_pad | patch interpolation and padding
    max_pool3d_with_indices | patch pooling | 2.13
torch.distributed.distributed_c10d
    _rank_not_in_group _get_default_store | refuse or count collectives
torch._C._distributed_c10d
    _compute_bucket_assignment_by_size | lay out the buckets of gradients
torch.nn.parallel.distributed:DistributedDataParallel
    _build_params_for_reducer _get_ddp_logging_data reducer | lay out the buckets of DDP
    _use_python_reducer | lay out the buckets of DDP
torch._C._distributed_c10d:Reducer
    _rebuild_buckets prepare_for_forward prepare_for_backward | lay out the buckets of DDP
torch._C._distributed_c10d:ProcessGroup
    _device_types _get_backend | choose ranks
torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel
    _handle _fsdp_wrapped_module | read a model that FSDP1 divides
torch.distributed.fsdp._flat_param:FlatParameter
    _params _local_shard _shard_param_infos _shapes | read a model that FSDP1 divides
    _is_flat_param | read a model that FSDP1 divides
    _contiguities | read a model that FSDP1 divides | 2.11
torch.distributed.algorithms._checkpoint.checkpoint_wrapper:CheckpointWrapper
    _checkpoint_wrapped_module | name a module
torch.distributed.pipelining.stage
    _PipelineStageBase | compare ranks
torchmetrics.metric:Metric
    _update_count _forward_cache _computed | resume
    _reductions _defaults _sync_dist _to_sync | keep a state of a metric for each logical rank
    distributed_available_fn reset update forward | keep a state of a metric for each logical rank
torchmetrics.collections:MetricCollection
    _enable_compute_groups _groups_checked _groups | keep a state of a metric for each logical rank
lightning.pytorch.strategies.launchers:_MultiProcessingLauncher
    launch | serve processes that Lightning starts
lightning.pytorch.trainer.trainer:Trainer
    _checkpoint_connector _logger_connector _results | resume and log
lightning.pytorch.trainer.connectors.checkpoint_connector:_CheckpointConnector
    resume_start _loaded_checkpoint _ckpt_path | resume
lightning.pytorch.trainer.connectors.logger_connector.logger_connector:_LoggerConnector
    _callback_metrics _first_loop_iter epoch_end_reached on_batch_end | log
lightning.pytorch.trainer.connectors.logger_connector.result
    _Metadata _Sync _ResultMetric | resume logged values
lightning.pytorch.trainer.connectors.logger_connector.result:_ResultMetric
    _forward_cache _computed | resume logged values
lightning.pytorch.loops.fit_loop:_FitLoop
    _combined_loader _combined_loader_states_to_load | resume within an epoch
    _load_combined_loader_states | resume within an epoch
    _data_source _data_fetcher _last_train_dl_reload_epoch | seed the loaders of a fit
    _skip_backward _can_stop_early | seed the loaders of a fit
    _loaded_from_state_dict | resume at the end of an epoch | 2.5
lightning.pytorch.loops.loop:_Loop
    _restarting | resume within an epoch
lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop
    _should_check_val_fx _should_accumulate _batches_that_stepped _results | resume within an epoch
    restarted_on_train_batch_end | resume in a hook after a batch | 2.5
    _broadcast_sigterm_tensor | let a logical rank have fewer batches | 2.6
lightning.pytorch.loops.evaluation_loop:_EvaluationLoop
    _combined_loader _data_source _last_val_dl_reload_epoch _results | resume within a validation
lightning.pytorch.utilities.combined_loader:CombinedLoader
    _mode _load_state_dicts | resume within an epoch
lightning.pytorch.core.module:LightningModule
    _compiler_ctx _on_before_batch_transfer | train logical ranks
lightning.pytorch.overrides.distributed:_IndexBatchSamplerWrapper
    _batch_sampler | seed a loader
lightning.pytorch.callbacks.lr_finder:LearningRateFinder
    _early_exit | tell a search from a fit
lightning.pytorch.callbacks.batch_size_finder:BatchSizeFinder
    _early_exit | tell a search from a fit
random
    _inst | see that a program seeds Python's generator
numpy.random.mtrand:RandomState
    _bit_generator | load a batch with separate generators
numpy.random:MT19937
    _legacy_seeding | load a batch with separate generators
threading:Thread
    _target | see what a thread runs
lightning.fabric.wrappers:_FabricDataLoader
    _dataloader _num_iter_calls | seed a loader of Fabric
"""


def list_hooks() -> Iterator[Hook]:
    """Yield the rows of the table, one for each name, for each of the packages that may have it."""
    place = ""
    for line in _TABLE.strip().splitlines():
        if not line.startswith(" "):
            place = line
            continue
        module, _, owner = place.partition(":")
        names, purpose, since = [part.strip() for part in f"{line} | ".split("|")[:3]]
        twins = (module.replace(*names_of_package) for names_of_package in _PACKAGES.items())
        for each in dict.fromkeys((module, *twins)):
            yield from (Hook(each, owner, name, purpose, since) for name in names.split())


def check_hooks() -> None:
    """Check the hooks of the modules that are loaded, those of each module once in a process.

    Raises:
        HookMissingError: A library lacks a name of the table.
    """
    # A module that is loaded later is checked by the next session: importing all of them takes
    # seconds, and a training uses few.
    # None stands for one whose import a program has forbidden.
    for module in [name for name in _ROWS if sys.modules.get(name) and name not in _checked]:
        for hook in find_missing(_ROWS[module], sys.modules.__getitem__):
            raise_missing(hook)
        _checked.add(module)


def find_missing(hooks: Iterable[Hook], load: Callable[[str], Any] = import_module) -> list[Hook]:
    """Return the hooks whose owner lacks the name, or is gone.

    Args:
        hooks: Rows of the table.
        load: Returns a module by its name.
    """
    missing = []
    for hook in hooks:
        try:
            owner = load(hook.module)
            for part in filter(None, hook.owner.split(".")):
                owner = getattr(owner, part)
            has_it = has_name(owner, hook.name)
        except (ImportError, KeyError, AttributeError):
            has_it = False
        if not has_it and has_release(hook):
            missing.append(hook)
    return missing


def has_release(hook: Hook) -> bool:
    """Return whether the installed release should have the name of a row.

    A library that is older than the row need not: ``compatibility.py`` says what does not work
    there. One that does not say its version counts as new.
    """
    release = parse_release(_read_version(hook.library)) or (sys.maxsize,)
    return release >= parse_release(hook.since)


def has_name(owner: Any, name: str) -> bool:
    """Return whether an owner has an attribute, or its constructor gives one to each object."""
    if hasattr(owner, name):
        return True
    # An attribute that `__init__` sets is not in the class. The names that its code uses are, and a
    # renamed attribute is not among them. Building an object instead would need a Trainer or CUDA.
    for base in owner.__mro__ if isinstance(owner, type) else ():
        makers = (inspect.unwrap(vars(base).get(maker, len)) for maker in ("__init__", "__new__"))
        codes = (getattr(getattr(maker, "__func__", maker), "__code__", None) for maker in makers)
        named = (name in code.co_names for code in codes if code is not None)
        if name in getattr(base, "__annotations__", ()) or any(named):
            return True
    return False


def raise_missing(hook: Hook) -> NoReturn:
    """Raise the error about a name that is gone."""
    version = _read_version(hook.library)
    raise HookMissingError(
        f"{hook.library} {version} lacks {hook}, which lightning_d9m needs to {hook.purpose}, so "
        f"runs could differ without a word. lightning_d9m was tested with {describe_tested()}: "
        "install one of these releases, or a later lightning_d9m.",
        library=hook.library,
        version=version,
        name=str(hook),
    )


def describe_tested() -> str:
    """Return the releases of the libraries that were tested."""
    return ", ".join(f"{name} {first} to {last}" for name, (first, last) in TESTED.items())


def _read_version(library: str) -> str:
    return str(getattr(sys.modules.get(library), "__version__", "")) or "of an unknown version"


_ROWS: dict[str, list[Hook]] = {}
for _hook in list_hooks():
    _ROWS.setdefault(_hook.module, []).append(_hook)
# The modules whose hooks this process has found.
_checked: set[str] = set()
