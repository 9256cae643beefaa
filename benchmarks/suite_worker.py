"""Measure one row of ``gpu_suite.py`` for each line of standard input, and answer in JSON.

``gpu_suite.py`` starts it with the arguments device, rounds, calls, only.
"""

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import suite_graphs
import torch
import torch.nn.functional as nnf
from competitor import Competitor
from patch_models import MODELS
from patch_workloads import WORKLOADS, Call, Workload
from torch import Tensor

from lightning_d9m.hashing.digest import _load_kernel, digest, digest_many
from lightning_d9m.hashing.model_tensors import NamedTensors
from lightning_d9m.hashing.tensor_bytes import locate
from lightning_d9m.ledger.stack import capture_stack
from lightning_d9m.patches.catalog.catalog import OPS, find_op
from lightning_d9m.patches.registration import patches_applied

OFFERED = [op.name for op in OPS if op.status == "offered"]
AHEAD_CYCLES = 2_000_000  # about a millisecond, in which the host enqueues work ahead of the device
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CUDA_SIZES = {"4 kB": 2**12, "1 MB": 2**20, "40 MB": 40 * 2**20, "400 MB": 400 * 2**20}
CUDA_SIZES |= {"4 GB": 2**32 + 2**20}
SIZES = {"cuda": CUDA_SIZES, "cpu": {"4 kB": 2**12, "1 MB": 2**20}}

Row = dict[str, object]


class Settings:
    """What is measured, and how often.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        rounds: The number of timed calls.
        calls: The number of compared calls.
        only: A part of the names of the ops and models.
    """

    def __init__(self, device: str, rounds: str, calls: str, only: str) -> None:
        self.device, self.rounds, self.calls, self.only = device, int(rounds), int(calls), only


@contextmanager
def deterministic(*, fill: bool = True) -> Iterator[None]:
    """Turn torch's flag on, with or without the fill of uninitialized memory."""
    settings = torch.utils.deterministic
    before = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(mode=True)
    settings.fill_uninitialized_memory = fill
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = before
        torch.use_deterministic_algorithms(mode=False)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make the inputs of workloads in a dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def patched(settings: Settings, op: str | None = None, *, fill: bool = True) -> Iterator[None]:
    """Run the body under the settings of a session, with an op that is patched on request too."""
    include = [op] if op is not None and find_op(op).status == "offered" else []
    with patches_applied(settings.device.upper(), include=include), deterministic(fill=fill):
        yield


def measure(call: Callable[[], object], settings: Settings) -> Row:
    """Return medians in microseconds and the peak of new memory in MB, after calls that warm up.

    For the device's time the device is kept busy first, so it does not wait for the host to launch
    kernels; in a training step it does not wait either. The host's time ends at the last launch.
    """
    for _ in range(3 if settings.device == "cuda" else 1):
        call()
    if settings.device == "cpu":
        times = [_time_host(call) for _ in range(settings.rounds)]
        return {"device_us": statistics.median(times), "host_us": None, "peak_mb": None}
    times, host = [], []
    for _ in range(settings.rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD_CYCLES)  # noqa: SLF001 - nothing public keeps a device busy
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    for _ in range(settings.rounds):
        torch.cuda.synchronize()
        host.append(_time_host(call))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    return {
        "device_us": statistics.median(times),
        "host_us": statistics.median(host),
        "peak_mb": peak,
    }


def _time_host(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


def list_outputs(call: Call) -> list[Tensor]:
    """Return the outputs of a call, detached."""
    outputs = call()
    tensors = outputs if isinstance(outputs, tuple) else (outputs,)
    return [tensor.detach() for tensor in tensors]


def count_outputs(call: Call, settings: Settings) -> int:
    """Return the number of distinct outputs of a call while something competes."""
    competitor = Competitor(settings.device)
    seen = set()
    for turn in range(settings.calls):
        competitor.disturb(turn)
        seen.add(tuple(digest_many(list_outputs(call))))
    return len(seen)


def differ(patched: Sequence[Tensor], original: Sequence[Tensor]) -> float:
    """Return the greatest difference of floating-point outputs, over the greatest magnitude."""
    worst = 0.0
    for left, right in zip(patched, original, strict=True):
        if right.is_floating_point() and right.numel():
            scale = right.double().abs().max().clamp(min=torch.finfo(torch.float64).tiny)
            worst = max(worst, float((left.double() - right.double()).abs().max() / scale))
    return worst


def describe(tensors: Sequence[Tensor]) -> list[str]:
    """Return dtype, shape and strides of tensors."""
    return [f"{t.dtype} {tuple(t.shape)} {t.stride()}" for t in tensors]


def run_facts(name: str, settings: Settings) -> Row:
    """Describe the machine, or measure what a copy and a product take."""
    device = settings.device
    if name == "stack":
        return {"stack": capture_stack()}
    if name == "nvidia-smi":
        program = shutil.which("nvidia-smi")
        if program is None:
            return {"unsupported": "there is no nvidia-smi"}
        done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=30)
        return {"text": done.stdout}
    if name == "copy":
        source = torch.ones(2**28 if device == "cuda" else 2**20, device=device)
        target = torch.zeros_like(source)
        row = measure(lambda: target.copy_(source), settings)
        return {**row, "gigabytes_per_second": source.nbytes / row["device_us"] / 1e3}
    side = 4096 if device == "cuda" else 256
    matrix = torch.randn(side, side, device=device)
    row = measure(lambda: matrix @ matrix, settings)
    return {**row, "teraflops": 2 * side**3 / row["device_us"] / 1e6}


def run_smoke(name: str, settings: Settings) -> Row:
    """Run something once."""
    if name == "patches":
        with patches_applied(settings.device.upper(), include=OFFERED) as applied:
            return {"patches": len(applied.names)}
    if name == "digest":
        return check_digest(settings.device)
    if name == "forward":
        return check_forward(settings)
    workload = find_workload(name)
    original = list_outputs(workload.make(settings.device))
    with patched(settings, workload.op):
        call = workload.make(settings.device)
        first, second = list_outputs(call), list_outputs(call)
    row: Row = {"difference": differ(first, original)}
    if describe(first) != describe(original):
        row["error"] = f"{describe(first)} in place of {describe(original)}"
    if digest_many(first) != digest_many(second):
        row["error"] = "two calls gave two outputs"
    return row


def check_digest(device: str) -> Row:
    """Compare digests on the device with those of the CPU."""
    tensors = [torch.randn(number * number * 131 + number) for number in range(20)]
    kernel = _load_kernel(torch.device(device, 0)) if device == "cuda" else None
    row: Row = {"kernel": kernel is not None}
    if digest_many([tensor.to(device) for tensor in tensors]) != digest_many(tensors):
        row["error"] = "the digests differ from the CPU's"
    elif device == "cuda" and kernel is None:
        row["error"] = "the digest kernel is not used"
    return row


def check_forward(settings: Settings) -> Row:
    """Return the first nodes of graphs that are built under the settings of a session."""
    image = torch.randn(2, 3, 6, 6, device=settings.device, requires_grad=True)
    volume = torch.randn(2, 3, 6, 6, 6, device=settings.device, requires_grad=True)
    with patched(settings):
        outputs = {
            "bilinear": nnf.interpolate(image, scale_factor=2, mode="bilinear"),
            "trilinear": nnf.interpolate(volume, scale_factor=2, mode="trilinear"),
            "replicate": nnf.pad(image, (1, 1, 1, 1), mode="replicate"),
            "max_pool3d": nnf.max_pool3d(volume, 2),
        }
        nodes = {name: output.grad_fn.name() for name, output in outputs.items()}
        for output in outputs.values():
            torch.autograd.grad(output.sum(), image if output.dim() == 4 else volume)
    wrong = [name for name, node in nodes.items() if "Index" in node and "WithIndices" not in node]
    return {"nodes": nodes, **({"error": f"decomposed: {wrong}"} if wrong else {})}


def run_determinism(name: str, settings: Settings) -> Row:
    """Count the distinct outputs of the versions of an op."""
    workload = find_workload(name)
    row: Row = {"op": workload.op, "offered": find_op(workload.op).status == "offered"}
    row["original_outputs"] = count_outputs(workload.make(settings.device), settings)
    with patched(settings, workload.op):
        row["patched_outputs"] = count_outputs(workload.make(settings.device), settings)
    if workload.make_deterministic:
        with deterministic():
            call = workload.make_deterministic(settings.device)
            row["torch_deterministic_outputs"] = count_outputs(call, settings)
    return row


def run_speed(name: str, settings: Settings) -> Row:
    """Measure the versions of an op; graphs are built under each version's settings."""
    workload = find_workload(name)
    row: Row = {"op": workload.op, "offered": find_op(workload.op).status == "offered"}
    call = workload.make(settings.device)
    row["original"] = measure(call, settings)
    original = list_outputs(call)
    for label, fill in (("patched", True), ("patched_fill_off", False)):
        with patched(settings, workload.op, fill=fill):
            call = workload.make(settings.device)
            row[label] = measure(call, settings)
            row["difference"] = differ(list_outputs(call), original)
    if workload.make_deterministic:
        with deterministic():
            call = workload.make_deterministic(settings.device)
            row["torch_deterministic"] = measure(call, settings)
    row["ratio"] = row["patched"]["device_us"] / row["original"]["device_us"]
    return row


def run_model(name: str, settings: Settings) -> Row:
    """Measure the training step of one model."""
    device, scale = settings.device, 8 if settings.device == "cuda" else 1
    make = MODELS[name]
    row: Row = {"plain": measure(make(device, scale), settings)}
    versions = {"fill_on": (True, []), "fill_off": (False, []), "offered": (True, OFFERED)}
    for label, (fill, include) in versions.items():
        with patches_applied(device.upper(), include=include), deterministic(fill=fill):
            row[label] = measure(make(device, scale), settings)
        row[f"{label}_ratio"] = row[label]["device_us"] / row["plain"]["device_us"]
    return row


def run_digest(name: str, settings: Settings) -> Row:
    """Measure the digest of one tensor, or of the weights of a model, beside a copy and a sum."""
    device = settings.device
    if name == "1,000 tensors":
        weights = [torch.rand(1000, device=device) for _ in range(1000)]
        named = NamedTensors([(str(number), tensor) for number, tensor in enumerate(weights)])
        return {
            "digest": measure(lambda: digest_many(weights), settings),
            "locate": measure(named.locate, settings),
            "copy": measure(lambda: [tensor.clone() for tensor in weights], settings),
        }
    size = SIZES[device][name]
    tensor = torch.zeros(size // 4, device=device)
    target = torch.empty_like(tensor)
    row: Row = {
        "bytes": tensor.nbytes,
        "digest": measure(lambda: digest(tensor), settings),
        "copy": measure(lambda: target.copy_(tensor), settings),
        "sum": measure(tensor.sum, settings),
    }
    kernel = _load_kernel(torch.device(device, 0)) if device == "cuda" else None
    if kernel is not None:
        memory = [locate(tensor)]
        place = torch.device(device, torch.cuda.current_device())
        row["kernel"] = measure(lambda: kernel.start_hashing(memory, place), settings)
        # The copy reads and writes; the digest only reads.
        row["share_of_copy_rate"] = row["copy"]["device_us"] / 2 / row["kernel"]["device_us"]
    return row


def run_graph(name: str, settings: Settings) -> Row:
    """Capture a call in a CUDA graph and replay it; without a device, call it."""
    if name == suite_graphs.COMPILED:
        mode = "reduce-overhead" if settings.device == "cuda" else None
        with patched(settings, "index_add"):
            return suite_graphs.train_compiled(settings.device, settings.calls, mode)
    workload = find_workload(name)
    with patched(settings, workload.op):
        if settings.device == "cuda":
            time_call = partial(measure, settings=settings)
            return suite_graphs.replay(workload, settings.calls, time_call)
        workload.make(settings.device)()
    return {"unsupported": "a CPU has no CUDA graphs"}


def find_workload(name: str) -> Workload:
    """Return the workload of a task."""
    return next(one for one in WORKLOADS if f"{one.op}, {one.shape}" == name)


def list_tasks(part: str, settings: Settings) -> list[str]:
    """Return the tasks of a part, in their order."""
    ops = [f"{one.op}, {one.shape}" for one in WORKLOADS if settings.only in one.op]
    models = [name for name in MODELS if settings.only in name] or [*MODELS][:1]
    if part == "facts":
        return ["stack", "nvidia-smi", "copy", "matmul"]
    if part == "smoke":
        return ["patches", "digest", "forward", *ops]
    if part == "digest":
        return [*SIZES[settings.device], "1,000 tensors"]
    if part == "graphs":
        return [*ops, suite_graphs.COMPILED]
    names = models if part == "models" else ops
    return [f"{name} | {dtype}" for dtype in DTYPES for name in names]


RUN = {
    "facts": run_facts,
    "smoke": run_smoke,
    "determinism": run_determinism,
    "speed": run_speed,
    "models": run_model,
    "digest": run_digest,
    "graphs": run_graph,
}


def answer(line: str, settings: Settings) -> Row:
    """Return the result of a task, or its error."""
    part, _, task = line.partition(" ")
    if part == "list":
        return {"tasks": list_tasks(task, settings)}
    name, _, dtype = task.partition(" | ")
    try:
        with (
            warnings.catch_warnings(record=True) as caught,
            default_dtype(DTYPES[dtype or "float32"]),
        ):
            warnings.simplefilter("always")
            unsupported = find_refusal(part, name, dtype, settings)
            row = unsupported or RUN[part](name, settings)
    except Exception as error:  # noqa: BLE001 - any error is the row's result
        return {"error": summarize(error), "fatal": not still_works(settings.device)}
    said = sorted({str(one.message).splitlines()[0] for one in caught})
    return {**row, **({"warnings": said} if said else {})}


def find_refusal(part: str, name: str, dtype: str, settings: Settings) -> Row | None:
    """Return the row of an op that torch's own kernel does not compute in a dtype."""
    if part not in {"determinism", "speed"} or dtype == "float32":
        return None
    try:
        list_outputs(find_workload(name).make(settings.device))
    except (RuntimeError, TypeError, NotImplementedError) as error:
        if not still_works(settings.device):
            raise
        return {"unsupported": summarize(error)}
    return None


def summarize(error: Exception) -> str:
    """Return class and first line of an error."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def still_works(device: str) -> bool:
    """Return whether the device still works: after some errors it does not in this process."""
    try:
        torch.ones(2, device=device).sum().item()
    except RuntimeError:
        return False
    return True


def main() -> None:
    settings = Settings(*sys.argv[1:])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries is not an answer
    cuda = settings.device == "cuda"
    named = torch.cuda.get_device_name() if cuda else platform.processor() or "cpu"
    print(json.dumps({"device": named, "torch": torch.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(line.strip(), settings)), file=answers, flush=True)


if __name__ == "__main__":
    main()
