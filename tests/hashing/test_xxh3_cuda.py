"""The CUDA kernel, proven without a GPU: interpreted bit for bit, and compiled for real ones.

The kernel is run by Triton's interpreter on tensors of the CPU, in a process of its own, because
Triton reads TRITON_INTERPRET once, on import.
"""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch

from lightning_d9m.errors import DigestError, SettingError
from lightning_d9m.hashing import digest as digest_module

pytest.importorskip("triton", reason="the kernel is written in Triton, which Linux alone has")

SUPPORT = Path(__file__).parents[1] / "support"
PREAMBLE = """
import json, sys, traceback
import numpy as np, torch
from triton_interpreter import spare_repetitions
from lightning_d9m.hashing import xxh3, xxh3_cuda
CPU = torch.device("cpu")
data = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 700_000, np.uint8))
base = data.data_ptr()
assert base % 16 == 0
def cut(size):
    xxh3.CHUNK_BYTES = xxh3_cuda.CHUNK_BYTES = size
    return size
def check(spans):
    memory = [(base + begin, size) for begin, size in spans]
    actual = xxh3_cuda.hash_memory(memory, CPU)
    expected = xxh3.hash_chunks(memory)
    differ = [span for span, a, e in zip(spans, actual, expected, strict=True) if a != e]
    assert not differ, differ
spare_repetitions()
failures = {}
for name, script in json.loads(sys.argv[1]).items():
    # The same code on shorter chunks, where the definition's do not matter: interpreting is slow.
    CHUNK = cut(131072 if name.startswith("the definition") else 8192)
    try:
        exec(script)
    except BaseException:
        failures[name] = traceback.format_exc()
print(json.dumps(failures))
"""

SCRIPTS = {
    "sizes around every boundary": """
sizes = [0, 1, 7, 8, 15, 16, 17, 1023, 1024, 1025, 2048, 4095, CHUNK - 1, CHUNK, CHUNK + 1]
check([(3, size) for size in sizes] + [(16, 2 * CHUNK + 1025)])
""",
    "every alignment": """
check([(begin, size) for begin in range(16) for size in (9, 1100)])
""",
    "many tensors in one launch": """
sizes = [(n * n * 7) % 1500 for n in range(30)] + [CHUNK + 5, 0, 1, 1]
check([(16 * n, size) for n, size in enumerate(sizes)])
check([])
check([(0, 0)])
""",
    "offsets beyond 32 bits": """
# A tensor that begins 2.6 GB below: the chunks up to here count as hashed before.
before, size = 2_600_000_000 // CHUNK, CHUNK + 100
table = torch.tensor([-before, base - before * CHUNK, before * CHUNK + size])
constants = xxh3_cuda._load_constants(torch.device("cpu"))
leaves = torch.empty(2, dtype=torch.int64)
xxh3_cuda.hash_chunks[(2,)](constants, table, leaves, 1, CHUNK=CHUNK, num_warps=1)
assert [leaves.numpy().tobytes()] == xxh3.hash_chunks([(base, size)])
""",
    "the definition's check before first use": """
assert xxh3_cuda.check_kernel(CPU)
assert not xxh3_cuda.check_kernel(torch.device("cuda"))
cut(8192)
xxh3_cuda._load_constants(CPU)[200] ^= 1
assert not xxh3_cuda.check_kernel(CPU)
xxh3_cuda._load_constants(CPU)[200] ^= 1
""",
}

COMPILED = """
import re, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from lightning_d9m.hashing.xxh3_cuda import hash_chunks
types = {"constants": "*i64", "table": "*i64", "leaves": "*i64"}
types |= {"count": "i32", "CHUNK": "constexpr"}
for capability in map(int, sys.argv[1:]):
    source = ASTSource(hash_chunks, types, {"CHUNK": 131072})
    target = GPUTarget("cuda", capability, 32)
    compiled = compile(source, target, {"num_warps": 1, "enable_fp_fusion": False})
    text = compiled.asm["ptx"]
    wide = len(re.findall(r"@%p\\d+ ld\\.global\\.v2\\.b64", text))
    local = len(re.findall(r"[ls][dt]\\.local", text))
    print(capability, "wide", wide, "shared", compiled.metadata.shared, "local", local)
"""


@pytest.fixture(scope="module")
def failures():
    """Run all scripts in one process, and return what went wrong in which."""
    path = os.pathsep.join([str(SUPPORT), *sys.path])
    return json.loads(_run(PREAMBLE, json.dumps(SCRIPTS), TRITON_INTERPRET="1", PYTHONPATH=path))


def _run(script, *arguments, **variables):
    run = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("name", SCRIPTS)
def test_interpreted_kernel_agrees_with_the_cpu(failures, name):
    assert name not in failures, failures[name]


def test_kernel_compiles_to_wide_loads_and_registers_alone(tmp_path):
    capabilities = ("80", "90", "100")
    printed = _run(COMPILED, *capabilities, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    # Four blocks on their way, each two loads of 16 bytes a thread; no shared memory, no spills.
    expected = [f"{one} wide 8 shared 0 local 0" for one in capabilities]
    assert printed.splitlines() == expected


def test_a_digest_within_a_captured_cuda_graph_is_refused(monkeypatch):
    """Also by a probe, which digests the type of a value that has no digest."""
    kernel = pytest.importorskip("lightning_d9m.hashing.xxh3_cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    with pytest.raises(SettingError, match="while a CUDA graph is captured") as refused:
        kernel.start_hashing([(64, 8)], torch.device("cuda", 0))
    assert not isinstance(refused.value, DigestError)


class TritonError(Exception):
    """Stands for Triton's own, which is of no narrower class."""


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        ({"return_value": False}, "its digests differ from the CPU's"),
        (
            {"side_effect": TritonError("Failed to find C compiler.")},
            r"TritonError: Failed to find C compiler\.; Triton needs gcc and",
        ),
    ],
)
def test_a_kernel_that_disagrees_or_cannot_be_compiled_is_not_used(check, reason):
    xxh3_cuda = pytest.importorskip("lightning_d9m.hashing.xxh3_cuda")
    load = digest_module.load_kernel.__wrapped__
    expected = pytest.warns(UserWarning, match=rf"on cuda:0 \({reason}.*Digests are the same")
    with mock.patch.object(xxh3_cuda, "check_kernel", **check), expected:
        assert load(torch.device("cuda", 0)) is None
