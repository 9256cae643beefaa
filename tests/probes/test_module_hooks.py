"""What probes and patches see of a module that Inductor compiles: what it leaves to torch's ops."""

import pytest
import torch
from ledger_runs import list_batches
from torch import nn

from lightning_d9m import Recorder, deterministic, read_ledger
from lightning_d9m.engine.probes.evidence import read_evidence
from lightning_d9m.ops.patches import registration

aten = torch.ops.aten
POOL, PAD, PRODUCT = (
    f"op (model)::aten.{name}"
    for name in ("adaptive_max_pool2d_backward", "reflection_pad2d_backward", "mm")
)


class Gradients(nn.Module):
    """Calls two patched operations, of which Inductor makes a kernel for the second."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()
        self.weight = nn.Parameter(torch.ones(4, 4))

    @torch.no_grad()
    def forward(self, images):
        images = self.inner(images) @ self.weight
        maxima, places = aten.adaptive_max_pool2d(images, [2, 2])
        pooled = aten.adaptive_max_pool2d_backward(maxima, images, places)
        padded = aten.reflection_pad2d_backward(images, images[..., 1:3, 1:3], [1, 1, 1, 1])
        return pooled.sum() + padded.sum()


@pytest.fixture
def no_cpp(monkeypatch, tmp_path):
    """Let Inductor do everything but compile C++: its kernels then write nothing."""
    from torch._inductor import config, cpu_vec_isa
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    sources = []

    def load(argtypes, source):
        sources.append(source)
        return lambda *_: None

    # Otherwise it compiles a program for each set of vector instructions.
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)
    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_pybinding", load)
    with config.patch(compile_threads=1, fx_graph_cache=False):
        yield sources
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_probes_and_patches_see_the_operations_that_inductor_calls(no_cpp, monkeypatch, tmp_path):
    called = []
    call = registration.Kernel.__call__

    def note(kernel, *args, **kwargs):
        if not getattr(registration._thread, "is_inside", False):
            called.append(kernel._replacement.func.__name__)
        return call(kernel, *args, **kwargs)

    monkeypatch.setattr(registration.Kernel, "__call__", note)

    def run(name, model):
        called.clear()
        monkeypatch.setenv("LIGHTNING_D9M_EVIDENCE", "x")
        settings = deterministic(seed=1, threads=1)
        patches = registration.patches_applied("CPU")
        with settings, patches, Recorder(tmp_path / name, model, probes="all") as run:
            for images in run.batches([torch.ones(1, 1, 4, 4)]):
                run.step(loss=model(images).sum())
        ((*_, entries),) = list_batches(read_ledger(run.ledger))
        read = read_evidence(run.ledger, 0)["ops"].values()
        (source,) = {one["source"] for one in read if one["op"].startswith("aten.mm")}
        return {f"{kind} {place}" for (kind, place, _), _ in entries}, list(called), source

    plain, calls, source = run("plain", Gradients())
    assert {"output inner", f"{POOL}.default", f"{PAD}.default", f"{PRODUCT}.default"} <= plain
    assert calls == ["_pool_backward", "_padding_backward"]
    seen, calls, compiled = run("compiled", torch.compile(Gradients()))
    assert {"input (model)", "output (model)", f"{POOL}.default", f"{PRODUCT}.out"} <= seen
    assert seen.isdisjoint({"output inner", f"{PAD}.default"})
    assert calls == ["_pool_backward"]
    assert len(no_cpp) == 2, no_cpp
    # In torch's generated code, an operation still has the line of the program.
    for line, call in ((source, "images"), (compiled, "model(images)")):
        assert line.startswith(f"{__file__}:")
        assert call in line.partition(": ")[2], line
