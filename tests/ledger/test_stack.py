"""The stack: what is recorded, what is left out, and how a difference is named."""

import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._inductor import config

from lightning_d9m.engine.ledger import stack as stack_module
from lightning_d9m.engine.ledger.stack import (
    COMPILER_CACHE,
    INFORMATIONAL,
    MISSING,
    capture_compiler,
    capture_stack,
    check_stack,
    stack_differences,
    table_differences,
)
from lightning_d9m.errors import StackDifferenceError

ONE = {"torch.version": "2.13.0", "device.driver": "560.35.03", "cpu.count": 8, "torch.cuda": None}


def test_what_changes_bits_shows(monkeypatch, set_threads):
    """Two threads are another stack than one, float64 another than float32."""
    before, dtype = capture_stack(), torch.get_default_dtype()
    set_threads(torch.get_num_threads() + 1)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    try:
        torch.set_default_dtype(torch.float64)
        after = capture_stack()
    finally:
        torch.set_default_dtype(dtype)
    found = {name for name, _, _ in stack_differences(before, after)}
    assert found >= {"threads.intraop", "flag.default_dtype", "flag.cudnn.benchmark"}


def test_variables_that_matter_are_recorded_and_paths_addresses_and_keys_are_not(monkeypatch):
    """By name, cut to a bound; a ledger is passed around."""
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "0" * 1000)
    monkeypatch.delenv("MKL_CBWR", raising=False)
    secrets = ("_HOROVOD_SECRET_KEY", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "NCCL_TOPO_FILE")
    for name in (*secrets, "NCCL_SOCKET_IFNAME", "TORCH_HOME", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "secret-of-mine")
    stack = capture_stack({"world.size": 4, "torch.version": "mine", "long": "x" * 999})
    assert stack["variable.NCCL_ALGO"] == "Ring"
    assert stack["variable.HOROVOD_FUSION_THRESHOLD"] == "0" * 256
    assert "variable.MKL_CBWR" not in stack
    assert "secret-of-mine" not in json.dumps(stack)
    # What only the caller knows comes last.
    assert (stack["world.size"], stack["torch.version"]) == (4, "mine")
    assert stack["long"] == "x" * 256


def capture_on(monkeypatch, devices, current=0):
    cuda = SimpleNamespace(type="cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: cuda)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(devices))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
    monkeypatch.setattr(torch.cuda, "get_device_properties", devices.__getitem__)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    return stack_module._capture_devices()


def make_device(name, uuid, **facts):
    facts = {"major": 9, "minor": 0, "multi_processor_count": 132, "total_memory": 2**36} | facts
    return SimpleNamespace(name=name, uuid=uuid, **facts)


def test_the_device_that_a_rank_computes_on_is_compared_and_no_other(monkeypatch):
    """Its place among those that are visible, and their number, change nothing."""
    first, equal = make_device("GPU", "aaaa-1"), make_device("GPU", "bbbb-2")
    other = make_device("Other", "cccc-3", major=8, minor=6, total_memory=24 * 2**30)
    one = capture_on(monkeypatch, [first])
    assert stack_differences(one, capture_on(monkeypatch, [first, equal, other] * 3)) == []
    assert stack_differences(one, capture_on(monkeypatch, [other, equal], current=1)) == []
    differences = stack_differences(one, capture_on(monkeypatch, [first, other], current=1))
    assert differences == [
        ("device.name", "GPU", "Other"),
        ("device.capability", "9.0", "8.6"),
        ("device.memory_gib", 64, 24),
    ]


def test_the_order_of_cuda_devices_is_recorded_without_their_uuids(monkeypatch):
    """NCCL builds its ring from the order; equal devices are not told apart otherwise."""
    devices = [make_device("GPU", "aaaa-1"), make_device("GPU", "bbbb-2")]
    stacks = [capture_on(monkeypatch, order) for order in (devices, devices[::-1])]
    orders = [stack["device.order"].split() for stack in stacks]
    assert orders[0] == orders[1][::-1]
    assert len(set(orders[0])) == 2
    assert "aaaa" not in str(stacks)
    assert stacks[0]["device.visible"] == "2 GPU"
    assert stack_differences(*stacks) == []


@pytest.mark.parametrize(
    ("read", "text", "found"),
    [
        ("driver", "NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\n", "535.104.05"),
        ("driver", "Open Kernel Module for x86_64  560.35.03  Release\n", "560.35.03"),
        ("cpu_model", "processor\t: 0\nmodel name\t: AMD EPYC 9654\n", "AMD EPYC 9654"),
        # An Arm processor has numbers in place of a name.
        ("cpu_model", "CPU implementer\t: 0x41\nCPU part\t: 0xd0c\n", "0x41 0xd0c"),
    ],
)
def test_what_files_of_the_system_say(monkeypatch, tmp_path, read, text, found):
    (tmp_path / "file").write_text(text)
    monkeypatch.setattr(stack_module, "Path", lambda _: tmp_path / "file")
    assert getattr(stack_module, f"_read_{read}")() == found


scalars = st.none() | st.booleans() | st.integers(0, 2) | st.text()
scalars |= st.floats(allow_nan=False) | st.sampled_from([-0.0, 1, 1.0, True, "missing"])
tables = st.dictionaries(st.sampled_from([*ONE, *INFORMATIONAL, "a", "b"]), scalars)


@given(tables, tables)
def test_a_difference_is_one_of_presence_type_or_bits(one, other):
    """Where an entry is absent it is MISSING, also where the other one holds that text."""
    differing = []
    for name in {**one, **other}:
        pair = [table.get(name, MISSING) for table in (one, other)]
        kinds = [(type(own), own.hex() if isinstance(own, float) else own) for own in pair]
        differing += [(name, *pair)] * (kinds[0] != kinds[1])
    found = table_differences(one, other)
    assert len(found) == len(differing)
    for (name, *pair), (known, *expected) in zip(found, differing, strict=True):
        assert name == known
        assert all(own is value for own, value in zip(pair, expected, strict=True))
    counted = [entry[0] for entry in found if entry[0] not in INFORMATIONAL]
    assert [entry[0] for entry in stack_differences(one, other)] == counted


def test_informational_fields_exist():
    """A misspelt one would be compared after all."""
    names = " ".join(stack_module._VARIABLES["variables"]).split()
    known = set(capture_stack()) | {f"variable.{name}" for name in names}
    assert set(INFORMATIONAL) <= known | {
        f"device.{one}" for one in ("count", "order", "visible")
    } | {COMPILER_CACHE}


def test_the_policy_decides_what_a_difference_does():
    """Field by field, aligned, with what to do; the facts are attributes."""
    other = ONE | {"device.driver": "570.00"}
    with pytest.raises(StackDifferenceError) as caught:
        check_stack(ONE, other, "raise")
    assert str(caught.value) == (
        "The stack differs from the reference's in 1 field, so another result would be no "
        "nondeterminism of this program:\n"
        "  device.driver\n"
        "    reference: 560.35.03\n"
        "    this run:  570.00\n"
        "Run on the stack of the reference, or record a new reference on this one; with the "
        "policy 'warn' the run continues."
    )
    assert caught.value.differences == (("device.driver", "560.35.03", "570.00"),)
    with pytest.warns(UserWarning, match="in 2 fields"):
        check_stack(ONE, other | {"x": 1}, "warn")
    check_stack(ONE, other, "ignore")
    check_stack(ONE, dict(ONE), "raise")


def test_the_compilers_cache_and_settings(monkeypatch, tmp_path):
    """The cache is cold until there is a graph, and is not compared; settings are."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    first = capture_compiler()
    assert first["compiler.cache"] == "cold"
    (tmp_path / "fxgraph").mkdir()
    assert capture_compiler() == first
    (tmp_path / "fxgraph" / "ab").mkdir()
    assert capture_compiler()["compiler.cache"] == "warm"
    with config.patch(force_disable_caches=True):
        assert capture_compiler()["compiler.cache"] == "disabled"
    with config.patch(max_autotune=not config.max_autotune):
        found = stack_differences(first, capture_compiler())
    assert [entry[0] for entry in found] == ["flag.inductor.max_autotune"]


@pytest.mark.parametrize("name", [*stack_module._NAMED, stack_module._USER])
def test_other_content_is_a_difference_and_another_path_is_none(name, tmp_path, monkeypatch):
    # The machine's own files are hidden.
    monkeypatch.setattr(stack_module, "_SYSTEM", str(tmp_path / "nccl.conf"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable in (*stack_module._NAMED, stack_module._USER):
        monkeypatch.delenv(variable, raising=False)
    stacks = []
    for file, text in (("secret-one", "0 1 2"), ("secret-two", "0 1 2"), ("other", "0 2 1")):
        (tmp_path / file).write_text(f"<ring>{text}</ring>")
        monkeypatch.setenv(name, str(tmp_path / file))
        stacks.append(capture_stack())
    assert stack_differences(stacks[0], stacks[1]) == []
    ((field, before, after),) = stack_differences(stacks[0], stacks[2])
    assert field == f"file.{name}"
    assert before != after
    assert "secret" not in str(stacks)
