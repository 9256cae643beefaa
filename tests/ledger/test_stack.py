"""The stack: what it records, what it leaves out, and how a difference is named."""

import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._inductor import config

from lightning_d9m.errors import StackDifferenceError
from lightning_d9m.ledger import stack as stack_module
from lightning_d9m.ledger.stack import (
    COMPILER_CACHE,
    INFORMATIONAL,
    MISSING,
    capture_compiler,
    capture_stack,
    check_stack,
    stack_differences,
    table_differences,
)

ONE = {"torch.version": "2.13.0", "device.driver": "560.35.03", "cpu.count": 8, "torch.cuda": None}


class TestCapture:
    @pytest.mark.parametrize(
        "field", ["threads.intraop", "flag.default_dtype", "flag.cudnn.benchmark"]
    )
    def test_what_changes_bits_shows(self, monkeypatch, field):
        """Two threads are another stack than one, float64 another than float32."""
        before = capture_stack()
        threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
        try:
            torch.set_num_threads(threads + 1)
            torch.set_default_dtype(torch.float64)
            monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
            after = capture_stack()
        finally:
            torch.set_num_threads(threads)
            torch.set_default_dtype(dtype)
        assert field in {name for name, _, _ in stack_differences(before, after)}

    def test_variables_that_matter(self, monkeypatch):
        """By name, cut to a bound; what is not set has no field."""
        monkeypatch.setenv("NCCL_ALGO", "Ring")
        monkeypatch.setenv("PYTHONHASHSEED", "0")
        monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "0" * 1000)
        monkeypatch.delenv("MKL_CBWR", raising=False)
        stack = capture_stack()
        assert stack["variable.NCCL_ALGO"] == "Ring"
        assert stack["variable.PYTHONHASHSEED"] == "0"
        assert stack["variable.HOROVOD_FUSION_THRESHOLD"] == "0" * 256
        assert "variable.MKL_CBWR" not in stack

    def test_paths_addresses_and_keys_stay_out(self, monkeypatch):
        """A ledger is passed around."""
        for name in (
            "_HOROVOD_SECRET_KEY",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR",
            "NCCL_TOPO_FILE",
            "NCCL_SOCKET_IFNAME",
            "TORCH_HOME",
            "WANDB_API_KEY",
        ):
            monkeypatch.setenv(name, "secret-of-mine")
        assert "secret-of-mine" not in json.dumps(capture_stack())

    def test_what_only_the_caller_knows(self):
        stack = capture_stack({"world.size": 4, "torch.version": "mine", "long": "x" * 999})
        assert (stack["world.size"], stack["torch.version"]) == (4, "mine")
        assert stack["long"] == "x" * 256

    def test_the_order_of_cuda_devices_is_recorded_without_their_uuids(self, monkeypatch):
        """NCCL builds its ring from the order; equal devices are not told apart otherwise."""
        stacks, cuda = [], SimpleNamespace(type="cuda")
        for uuids in (("aaaa-1", "bbbb-2"), ("bbbb-2", "aaaa-1")):
            devices = [
                SimpleNamespace(
                    name="GPU",
                    major=9,
                    minor=0,
                    multi_processor_count=132,
                    total_memory=2**36,
                    uuid=uuid,
                )
                for uuid in uuids
            ]
            monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: cuda)
            monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
            monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
            monkeypatch.setattr(torch.cuda, "get_device_properties", devices.__getitem__)
            stacks.append(stack_module._capture_devices())
        orders = [stack["device.order"].split() for stack in stacks]
        assert orders[0] == orders[1][::-1]
        assert len(set(orders[0])) == 2
        assert "aaaa" not in str(stacks)
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
    def test_what_files_of_the_system_say(self, monkeypatch, tmp_path, read, text, found):
        (tmp_path / "file").write_text(text)
        monkeypatch.setattr(stack_module, "Path", lambda _: tmp_path / "file")
        assert getattr(stack_module, f"_read_{read}")() == found


scalars = st.none() | st.booleans() | st.integers() | st.text()
tables = st.dictionaries(st.sampled_from([*ONE, *INFORMATIONAL, "a", "b"]), scalars)


class TestDifferences:
    def test_informational_fields_exist(self):
        """A misspelt one would be compared after all."""
        known = set(capture_stack()) | {f"variable.{name}" for name in stack_module._VARIABLES}
        assert set(INFORMATIONAL) <= known | {"device.order", COMPILER_CACHE}

    @given(tables, tables)
    def test_none_means_equal(self, one, other):
        """Whatever the fields: nothing is reported just when those that count are the same."""
        kept = [
            {
                name: (type(value), value)
                for name, value in table.items()
                if name not in INFORMATIONAL
            }
            for table in (one, other)
        ]
        assert (stack_differences(one, other) == []) == (kept[0] == kept[1])


@pytest.mark.parametrize(
    ("one", "other"),
    [(0.0, -0.0), (1, 1.0), (1, True), (0, False), (None, "None"), (1.0, 1.0000000000000002)],
)
def test_values_that_differ_in_type_or_bits(one, other):
    assert table_differences({"x": one}, {"x": other}) == [("x", one, other)]
    assert table_differences({"x": one}, {"x": one}) == []


@pytest.mark.parametrize("value", ["missing", None, "", 0])
def test_a_field_that_one_table_lacks(value):
    """Also where the other one holds the text "missing"."""
    ((_, one, other),) = table_differences({}, {"x": value})
    assert (one is MISSING, other is value) == (True, True)
    ((_, one, other),) = table_differences({"x": value}, {})
    assert (one is value, other is MISSING) == (True, True)


class TestPolicy:
    OTHER = ONE | {"device.driver": "570.00"}

    def test_raise(self):
        """Field by field, aligned, with what to do; the facts are attributes."""
        with pytest.raises(StackDifferenceError) as caught:
            check_stack(ONE, self.OTHER, "raise")
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

    def test_warn_and_ignore(self):
        message = check_stack(ONE, self.OTHER | {"x": 1}, "warn")
        assert message is not None
        assert "in 2 fields" in message
        assert check_stack(ONE, self.OTHER, "ignore") is None
        assert check_stack(ONE, dict(ONE), "raise") is None


@pytest.fixture
def graphs(monkeypatch, tmp_path):
    """Return the folder of compiled graphs of an empty cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path / "fxgraph"


def test_the_cache_is_cold_until_there_is_a_graph(graphs):
    assert capture_compiler()["compiler.cache"] == "cold"
    graphs.mkdir()
    assert capture_compiler()["compiler.cache"] == "cold"
    (graphs / "ab").mkdir()
    assert capture_compiler()["compiler.cache"] == "warm"
    with config.patch(force_disable_caches=True):
        assert capture_compiler()["compiler.cache"] == "disabled"


def test_settings_are_compared_and_the_cache_is_not(graphs):
    first = capture_compiler()
    (graphs / "ab").mkdir(parents=True)
    with config.patch(max_autotune=not config.max_autotune):
        found = stack_differences(first, capture_compiler())
    assert [entry[0] for entry in found] == ["flag.inductor.max_autotune"]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return a folder; this machine's own files are hidden."""
    monkeypatch.setattr(stack_module, "_SYSTEM", str(tmp_path / "nccl.conf"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    for name in (*stack_module._NAMED, stack_module._USER):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize("name", [*stack_module._NAMED, stack_module._USER])
def test_other_content_is_a_difference_and_another_path_is_none(name, machine, monkeypatch):
    graph, copy, other = machine / "secret-one", machine / "secret-two", machine / "other"
    graph.write_text("<ring>0 1 2</ring>")
    copy.write_text("<ring>0 1 2</ring>")
    other.write_text("<ring>0 2 1</ring>")
    stacks = []
    for path in (graph, copy, other):
        monkeypatch.setenv(name, str(path))
        stacks.append(capture_stack())
    assert stack_differences(stacks[0], stacks[1]) == []
    ((field, before, after),) = stack_differences(stacks[0], stacks[2])
    assert field == f"file.{name}"
    assert before != after
    assert "secret" not in str(stacks)
