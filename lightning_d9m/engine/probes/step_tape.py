"""The operations of one step, from which it runs again without the program and its data.

A value is what a tensor holds, in the order of its storage, under its digest. An operation names
the values that it is given and those that it leaves. So only what no earlier operation has left
needs to be kept: the state before the step, the batch, and what the program makes without torch.
"""

import sys
from collections.abc import Mapping
from inspect import unwrap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from lightning_d9m.engine.hashing.digest import digest, digest_value
from lightning_d9m.engine.probes.module_hooks import OpMode, copy_inputs
from lightning_d9m.engine.probes.op_values import TAG, is_plain, is_tagged, keep
from lightning_d9m.engine.probes.settings import ProbeSettings
from lightning_d9m.engine.probes.trace import ProbeCollector


class StepTape(OpMode):
    """Takes every operation of torch while it is entered.

    Attributes:
        ops: The operations, in order: what ``run_op`` takes, with references to values in place of
            tensors, what each leaves, and the line that called it.
        values: The values that no operation has left, by key.
        skipped: Names of calls that are not of one operation, such as a kernel of Triton.
    """

    def __init__(self) -> None:
        # The base class records operations of a model; of it only the search for the calling line
        # is used.
        super().__init__(nn.Module(), ProbeSettings(), ProbeCollector(lambda _: None))
        self.ops: list[dict[str, Any]] = []
        self.values: dict[str, Tensor] = {}
        self.skipped: list[str] = []
        self._known: set[str] = set()

    finds_sources = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and take what it is given and what it leaves."""
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            self.skipped.append(str(func))
            return func(*args, **kwargs)
        origin = self._find_origin()
        # Before the operation runs, since it may write to its arguments.
        entry = tree_map(self._take, copy_inputs(func, args, kwargs), is_leaf=is_tagged)
        outputs = func(*args, **kwargs)
        # All arguments: batch norms, for one, do not declare that they write to their buffers.
        left = refer(keep([outputs, args, kwargs]))
        self._known.update(list_keys(left))
        entry |= {
            "left": _leave_out_numbers(left),
            "digest": digest_value(left),
            "source": origin.source,
            "backward": origin.backward,
        }
        if list_keys([entry["args"], left]):  # else it has no data, as the marks of a profiler
            self.ops.append(entry)
        return outputs

    def save(self, path: Path, last: int) -> None:
        """Write operations and values to a file, with the last global step that they make."""
        # Looked up and not imported: the import takes long, and without it nothing was compiled.
        # Dynamo counts each frame that it has compiled as "ok".
        dynamo = sys.modules.get("torch._dynamo.utils")
        if dynamo is not None and dynamo.counters["frames"]["ok"]:
            # A dispatch mode does not see compiled code, which may run any part of the step.
            self.skipped.append("compiled code")
        saved = {"ops": self.ops, "values": self.values, "skipped": self.skipped, "last": last}
        # Not a file of the program, which ``saved_files.py`` leaves out.
        unwrap(torch.save)(saved, path)

    def _take(self, leaf: Any) -> Any:
        """Return a reference to a tensor, and keep its value if no operation has left it."""
        if not isinstance(leaf, Tensor):
            return leaf
        found = _refer(leaf)
        if is_reference(found) and found["key"] not in self._known:
            self._known.add(found["key"])
            # A view is enough, because `copy_inputs` has copied the tensor.
            self.values[found["key"]] = flatten(leaf).cpu()
        return found


def refer(kept: Any) -> Any:
    """Return what ``keep`` gave with a reference in place of each tensor, and each generator."""

    def replace(leaf: Any) -> Any:
        if is_tagged(leaf) and "state" in leaf:
            return leaf | {"state": digest(leaf["state"])}
        return _refer(leaf) if isinstance(leaf, Tensor) else leaf

    return tree_map(replace, kept, is_leaf=is_tagged)


def _leave_out_numbers(left: Any) -> Any:
    """Return what an operation leaves with None for what is not a tensor, which may be data."""
    return tree_map(lambda x: x if is_reference(x) else None, left, is_leaf=is_tagged)


def _refer(tensor: Tensor) -> dict[str, Any]:
    if tensor.is_meta or tensor.is_quantized:  # no digest
        return {TAG: "text", "text": f"{tensor.dtype} on {tensor.device}"}
    found = {TAG: "value", "key": digest(flatten(tensor)), "device": str(tensor.device)}
    # A shape and strides belong to the use of a value, not to the value: a weight and its transpose
    # are one value in the file.
    layout = {"shape": [*tensor.shape], "stride": [*tensor.stride()]} if is_plain(tensor) else {}
    return found | layout


def flatten(tensor: Tensor) -> Tensor:
    """Return what the storage of a tensor from ``keep`` holds, if it has one, as one row."""
    if not is_plain(tensor):
        return tensor
    span = tensor.untyped_storage().nbytes() // tensor.element_size()
    # Between the elements of a part of a tensor are those of others, which change without it.
    return tensor.flatten() if span > tensor.numel() else tensor.as_strided((span,), (1,))


def is_reference(leaf: Any) -> bool:
    """Return whether a leaf stands for a value."""
    return is_tagged(leaf) and leaf[TAG] == "value"


def list_keys(tree: Any) -> list[str]:
    """Return the keys of the values to which a tree refers."""
    return [own["key"] for own in tree_leaves(tree, is_leaf=is_tagged) if is_reference(own)]


def look_up(tree: Any, values: Mapping[str, Tensor], device: str = "") -> Any:
    """Return a tree with the values to which it refers as tensors, on their device by default."""

    def find(leaf: Any) -> Any:
        if not is_reference(leaf):
            return leaf
        value = values[leaf["key"]].to(device or leaf["device"])
        if "shape" not in leaf:
            return value
        shape, stride = leaf["shape"], leaf["stride"]
        span = 1 + sum((size - 1) * own for size, own in zip(shape, stride, strict=True))
        # `flatten` has left out what lies between the elements. A kernel may be chosen by strides,
        # so the tensor gets those that it had.
        if value.numel() != span and value.numel():
            whole = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
            return whole.copy_(value.view(shape))
        return value.as_strided(shape, stride)

    return tree_map(find, tree, is_leaf=is_tagged)
