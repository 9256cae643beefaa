"""``d9m doctor`` finds each problem, and does not report it once it is fixed."""

import json
import warnings

import pytest
import torch

from lightning_d9m import SettingError
from lightning_d9m.engine.control import doctor
from lightning_d9m.engine.control import environment as variables
from lightning_d9m.engine.control.doctor import CheckResult
from lightning_d9m.integrations.strategies.horovod import environment as horovod_doctor
from lightning_d9m.integrations.strategies.horovod.environment import PINNED
from lightning_d9m.ops.patches.registration import patches_applied
from lightning_d9m.ops.patches.triton import launch
from lightning_d9m.tools.audit import device
from lightning_d9m.tools.audit.device import try_device


@pytest.fixture(autouse=True)
def healthy(monkeypatch):
    """An environment without problems, with Horovod installed."""
    names = [variable.name for variable in variables.VARIABLES]
    for name in [*names, *(v.name for v in PINNED), "OMP_DYNAMIC"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "describe_hash_seed_problem", lambda: None)
    installed = {f"package.{name}": "1.2.3" for name in ("lightning", "horovod")}
    monkeypatch.setattr(horovod_doctor, "capture_stack", lambda: installed)
    monkeypatch.setattr(variables, "_NUMBER_AT_START", "")  # of OMP_NUM_THREADS
    monkeypatch.setattr(horovod_doctor, "import_horovod", lambda: None)


def find(name):
    """Return the result of one check; None without such a check."""
    results = [*doctor.find_problems(), *horovod_doctor.check_installation()]
    return {result.name: result for result in results}.get(name)


def test_the_command_prints_problems_first_and_their_fixes(d9m, monkeypatch):
    status, out, _ = d9m("doctor")
    assert status == 0
    assert out.startswith("No problems found, but 1 note.\n\n")
    monkeypatch.setenv("NCCL_ALGO", "NVLS")
    status, out, _ = d9m("doctor")
    assert status == 1
    assert out.startswith("1 problem found.\n\nproblem  NCCL_ALGO: NVLS\n")
    assert "\n         Fix: " in out
    monkeypatch.setenv("HOROVOD_AUTOTUNE", "1")
    status, out, _ = d9m("doctor", "--json")
    statuses = [finding["status"] for finding in json.loads(out)["findings"]]
    assert statuses == sorted(statuses, key=["problem", "note", "ok"].index)
    assert (status, statuses.count("problem")) == (1, 2)


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("SEED", "abc", "is 'abc'; allowed: a whole number"),
        ("THREADS", "0", "threads is 0; allowed"),
        ("ON_DRIFT", "shrug", "is 'shrug'; allowed: raise or warn"),
        ("PROVABEL", "1", "Did you mean LIGHTNING_D9M_PROVABLE?"),
    ],
)
def test_a_variable_of_ours_that_ends_each_run_is_found(d9m, monkeypatch, name, value, found):
    monkeypatch.setenv(f"LIGHTNING_D9M_{name}", value)
    status, out, _ = d9m("doctor", "--json")
    findings = {finding["name"]: finding for finding in json.loads(out)["findings"]}
    assert (status, findings["LIGHTNING_D9M_*"]["status"]) == (1, "problem")
    assert found in findings["LIGHTNING_D9M_*"]["found"]


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:2", ":4096:8"),
        ("NCCL_ALGO", "Tree,NVLS", "Ring"),
        ("FLASH_ATTENTION_DETERMINISTIC", "0", "1"),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1", "0"),
        ("OMP_DYNAMIC", "TRUE", "false"),
        ("HOROVOD_FUSION_THRESHOLD", "67108864", "0"),
        ("HOROVOD_AUTOTUNE", "1", "0"),
        ("HOROVOD_ELASTIC", "1", "0"),
    ],
)
def test_a_variable_that_allows_nondeterminism_is_found(monkeypatch, name, bad, good):
    assert find(name).found.startswith("not set")
    monkeypatch.setenv(name, bad)
    result = find(name)
    assert (result.status, result.found) == ("problem", bad)
    assert result.fix
    monkeypatch.setenv(name, good)
    assert find(name) == CheckResult(name, "ok", good)


def test_horovod_that_cannot_be_imported_and_a_missing_lightning_are_found(monkeypatch):
    def fail():
        raise SettingError("refused") from ImportError("no mpi_lib_v2")

    assert {find("Horovod").status, find("Lightning").status} == {"ok"}
    monkeypatch.setattr(horovod_doctor, "import_horovod", fail)
    assert find("Horovod").found == "1.2.3, which cannot be imported (no mpi_lib_v2)"
    assert (find("Horovod").status, find("Horovod").fix) == ("problem", "d9m install-horovod")
    monkeypatch.setattr(horovod_doctor, "capture_stack", dict)
    assert find("Lightning").status == "note"
    assert find("Horovod") is find("HOROVOD_ELASTIC") is None


@pytest.mark.parametrize(
    ("owner", "attribute", "value", "status"),
    [
        pytest.param(torch, "__version__", "2.3.1+cpu", "problem", id="too old"),
        pytest.param(torch, "__version__", "2.9.1", "note", id="without patches"),
        pytest.param(torch, "__version__", "2.11.0a0+git1", "ok", id="built from source"),
        pytest.param(torch, "__version__", "3.0.0", "ok", id="newer"),
        pytest.param(torch.version, "hip", "6.4", "note", id="for ROCm"),
    ],
)
def test_the_state_of_torch_is_judged(monkeypatch, owner, attribute, value, status):
    monkeypatch.setattr(owner, attribute, value)
    assert find("torch").status == status


def test_an_address_that_other_hosts_cannot_reach_is_found(monkeypatch):
    def judge(first, address):
        monkeypatch.setattr(doctor.socket, "gethostbyname", lambda _: address)
        monkeypatch.setenv("MASTER_ADDR", first)
        return getattr(find("GLOO_SOCKET_IFNAME"), "status", None)

    assert judge("10.0.0.1", "127.0.1.1") == "problem"
    assert judge("10.0.0.1", "10.0.0.2") == "ok"
    assert judge("127.0.0.1", "127.0.1.1") is None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert judge("10.0.0.1", "127.0.1.1") == "ok"


def test_a_number_of_threads_that_torch_chooses_is_noted(monkeypatch):
    values = {"": "note", "four": "note", "0": "note", "2": "ok", "2,1": "ok"}
    for value, status in values.items():
        # OpenMP has read it by now, and ignores what is not a number above 0.
        monkeypatch.setattr(variables, "_NUMBER_AT_START", value)
        assert find("CPU threads").status == status


def test_a_device_is_tried_in_a_session(d9m, monkeypatch):
    """If torch finds one; any warning is a problem, and what a session sets is restored."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    tried = []
    monkeypatch.setattr(
        device, "try_device", lambda one: tried.append(one) or try_device(torch.device("cpu"))
    )
    status, out, _ = d9m("doctor")
    assert status == 0
    assert tried == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert out.count("device cpu") == 2
    assert "digests and patched ops are the CPU's (checked in" in " ".join(out.split())
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("step", "planted", "found"),
    [
        ("digest_many", lambda own: [len(own), object()], "digests on the device differ"),
        ("digest_many", lambda _: warnings.warn("No kernel", stacklevel=1), "No kernel"),
        ("digest_many", lambda _: 1 / 0, "ZeroDivisionError: division by zero"),
        ("compute_examples", lambda _: [torch.rand(9)], "patched ops on the device differ from"),
    ],
)
def test_what_a_tried_device_does_wrong_is_a_problem(step, planted, found, monkeypatch):
    monkeypatch.setattr(device, step, planted)
    result = try_device(torch.device("cpu"))
    assert result.status == "problem"
    assert result.found.startswith(found)


def test_each_kernel_that_a_tried_device_cannot_use_is_named(monkeypatch):
    monkeypatch.setattr(launch, "_check", lambda *_: 1 / 0)
    monkeypatch.setattr(launch, "_checked", set())
    monkeypatch.setattr(launch, "_device_types", {"cpu"})
    monkeypatch.setattr(launch, "_withdrawn", set())
    with patches_applied("CPU"):
        found = try_device(torch.device("cpu")).found
    for path in ("kernels:accumulate", "kernels:add_taps"):
        assert f"The Triton kernel {path} cannot be used (ZeroDivisionError" in found
