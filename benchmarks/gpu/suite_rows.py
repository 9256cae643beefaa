"""Rows of the suite, one function for each part but those of ``suite_device.py``."""

import shutil
import subprocess
import warnings

import torch
import torch.nn.functional as nnf
from patch_workloads import TORCHS, WORKLOADS, Workload
from probe_models import KINDS
from suite_journal import Row
from suite_measures import (
    Settings,
    collect_outputs,
    count_outputs,
    describe,
    deterministic,
    differ,
    list_outputs,
    measure,
    patched,
)
from torch import Tensor, nn

from lightning_d9m.engine.hashing.digest import digest, digest_many, load_kernel, locate
from lightning_d9m.engine.ledger.stack import capture_stack
from lightning_d9m.ops.patches.registration import patches_applied
from lightning_d9m.ops.portability.mode import portable

CUDA_SIZES = {"4 kB": 2**12, "1 MB": 2**20, "40 MB": 40 * 2**20, "400 MB": 400 * 2**20}
CUDA_SIZES |= {"4 GB": 2**32 + 2**20}
# Differences from torch's own values, over the greatest magnitude. Sums in another order differ by
# up to 5e-6 on a CPU, torch's CTC in float32 from float64 by 3e-2.
BOUND, BOUNDS = 1e-4, {"ctc_loss_backward": 5e-2}
FREE_INDICES = ("median", "nanmedian")  # of equal values, torch returns any
SIZES = {"cuda": CUDA_SIZES, "cpu": {"4 kB": 2**12, "1 MB": 2**20}}

COMPILED = "torch.compile, reduce-overhead"
WAITING = ("bincount",)  # the host reads a value of the device, in torch's own version as well
WARM_UP = 3


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
        with patches_applied(settings.device.upper()) as names:
            return {"patches": len(names)}
    if name == "forward":
        return check_forward(settings)
    return check_values(find_workload(name), settings)


def check_values(workload: Workload, settings: Settings) -> Row:
    """Compare two patched calls with each other, and with torch's own."""
    with warnings.catch_warnings():  # torch's own; those that follow count
        warnings.simplefilter("ignore")
        original = list_outputs(workload.make(settings.device)())
    with patched(settings):
        call = workload.make(settings.device)
        first, second = list_outputs(call()), list_outputs(call())
    compared = 1 if workload.op in FREE_INDICES else len(first)
    bound = BOUNDS.get(workload.op, BOUND)
    row: Row = {"difference": differ(first[:compared], original[:compared]), "bound": bound}
    if row["difference"] > bound:  # a device's own kernel may take any of several values
        expected = list_outputs(workload.make("cpu")())
        row["difference_from_cpu"] = differ(first[:compared], expected[:compared])
        if row["difference_from_cpu"] > bound:
            row["error"] = "the values differ from torch's by more than the bound"
    if describe(first) != describe(original):
        row["error"] = f"{describe(first)} in place of {describe(original)}"
    if digest_many(first) != digest_many(second):
        row["error"] = "two calls gave two outputs"
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
    row: Row = {"op": workload.op, "status": "exempt" if workload.op in TORCHS else "patched"}
    row["original_outputs"] = count_outputs(workload.make(settings.device), settings)
    with patched(settings):
        row["patched_outputs"] = count_outputs(workload.make(settings.device), settings)
    if workload.make_deterministic:
        with deterministic():
            call = workload.make_deterministic(settings.device)
            row["torch_deterministic_outputs"] = count_outputs(call, settings)
    return row


def run_speed(name: str, settings: Settings) -> Row:
    """Measure the versions of an op; graphs are built under each version's settings."""
    workload = find_workload(name)
    row: Row = {"op": workload.op, "status": "exempt" if workload.op in TORCHS else "patched"}
    call = workload.make(settings.device)
    row["original"] = measure(call, settings)
    original = list_outputs(call())
    for label, fill in (("patched", True), ("patched_fill_off", False)):
        with patched(settings, fill=fill):
            call = workload.make(settings.device)
            row[label] = measure(call, settings)
            row["difference"] = differ(list_outputs(call()), original)
    if workload.make_deterministic:
        with deterministic():
            call = workload.make_deterministic(settings.device)
            row["torch_deterministic"] = measure(call, settings)
    row["ratio"] = row["patched"]["device_us"] / row["original"]["device_us"]
    return row


def run_portable(name: str, settings: Settings) -> Row:
    """Compare gradients and a step of AdamW, computed with portable bits, with the CPU's."""
    found = {}
    with portable():
        for device in dict.fromkeys(("cpu", settings.device)):
            torch.manual_seed(0)
            model = KINDS[name]().to(device)
            inputs = torch.stack([KINDS[name].data()[number][0] for number in range(4)])
            model.layers(inputs.to(device)).square().mean().backward()
            torch.optim.AdamW(model.parameters()).step()
            found[device] = digest_many(
                [one for part in model.parameters() for one in (part, part.grad)]
            )
    same = len({tuple(own) for own in found.values()}) == 1
    return {"tensors": len(found["cpu"]), **({} if same else {"error": "not the CPU's bits"})}


def run_digest(name: str, settings: Settings) -> Row:
    """Measure the digest of one tensor, or of the weights of a model, beside a copy and a sum."""
    device = settings.device
    if name == "1,000 tensors":
        weights = [torch.rand(1000, device=device) for _ in range(1000)]
        return {
            "digest": measure(lambda: digest_many(weights), settings),
            "locate": measure(lambda: [locate(tensor) for tensor in weights], settings),
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
    kernel = load_kernel(torch.device(device, 0)) if device == "cuda" else None
    if kernel is not None:
        memory = [locate(tensor)]
        place = torch.device(device, torch.cuda.current_device())
        row["kernel"] = measure(lambda: kernel.start_hashing(memory, place), settings)
        # The copy reads and writes; the digest only reads.
        row["share_of_copy_rate"] = row["copy"]["device_us"] / 2 / row["kernel"]["device_us"]
    return row


def run_graph(name: str, settings: Settings) -> Row:
    """Capture a call in a CUDA graph and replay it; without a device, call it."""
    if name == COMPILED:
        with patched(settings):
            return train_compiled(settings)
    workload = find_workload(name)
    with patched(settings):
        if settings.device == "cuda":
            return replay(workload, settings)
        workload.make(settings.device)()
    return {"unsupported": "a CPU has no CUDA graphs"}


def replay(workload: Workload, settings: Settings) -> Row:
    """Capture a call under the present settings; compare and measure its replays."""
    if workload.op in WAITING:
        return {"unsupported": "the host waits for the device"}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # a gradient runs on the stream of the forward pass
        call = workload.make("cuda")
        for _ in range(WARM_UP):
            call()
        expected = tuple(digest_many(list_outputs(call())))
        eager = measure(call, settings)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs = list_outputs(call())

    def run_again() -> tuple[Tensor, ...]:
        graph.replay()
        return tuple(outputs)

    seen = collect_outputs(run_again, settings)
    times = {"replay": measure(graph.replay, settings), "eager": eager}
    row: Row = {"replayed_outputs": len(seen), **times}
    if seen != {expected}:
        row["error"] = "replays differ from the call, or from each other"
    return row


class Resizing(nn.Module):
    """Padding, a convolution, upsampling and a sum by index."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1, padding_mode="replicate")

    def forward(self, images: Tensor, places: Tensor) -> Tensor:
        """Return sums of pixels of shape (5, 8)."""
        image = nnf.interpolate(self.convolution(images), scale_factor=2, mode="bilinear")
        pixels = image.movedim(1, 3).reshape(-1, 8)
        return pixels.new_zeros(5, 8).index_add(0, places, pixels)


def train_compiled(settings: Settings) -> Row:
    """Compare the gradients of a compiled module in several calls."""
    device = settings.device
    torch.manual_seed(0)
    module = Resizing().to(device)
    images = torch.randn(2, 3, 16, 16, device=device)
    places = torch.randint(5, (2 * 32 * 32,), device=device)
    compiled = torch.compile(module, mode="reduce-overhead") if device == "cuda" else module
    seen = []
    for _ in range(WARM_UP + settings.calls):
        module.zero_grad()
        compiled(images, places).square().sum().backward()
        seen.append(tuple(digest_many([part.grad for part in module.parameters()])))
    found = len({*seen[WARM_UP:]})
    return {"outputs": found, **({"error": "several outputs"} if found > 1 else {})}


def find_workload(name: str) -> Workload:
    """Return the workload of a task."""
    return next(one for one in WORKLOADS if f"{one.op}, {one.shape}" == name)
