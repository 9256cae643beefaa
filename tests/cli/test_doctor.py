"""``d9m doctor`` finds each problem, and does not report it once it is fixed."""

import json
import subprocess
import warnings
from importlib.metadata import PackageNotFoundError

import pytest
import torch

from lightning_d9m import SettingError
from lightning_d9m.audit import device
from lightning_d9m.audit.device import compute_examples, try_device
from lightning_d9m.cli.doctor import format_findings
from lightning_d9m.control import doctor
from lightning_d9m.control import environment as variables
from lightning_d9m.control.doctor import CheckResult
from lightning_d9m.horovod import doctor as horovod_doctor
from lightning_d9m.horovod.environment import PINNED
from lightning_d9m.patches.registration import patches_applied
from lightning_d9m.patches.triton import launch

NAMES = [variable.name for variable in variables.VARIABLES]


@pytest.fixture
def healthy(monkeypatch):
    """An environment without problems, with Horovod installed."""
    names = [*NAMES, *PINNED, "HOROVOD_ELASTIC"]
    for name in [*names, "OMP_NUM_THREADS", "OMP_DYNAMIC", "PL_GLOBAL_SEED"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "describe_hash_seed_problem", lambda: None)
    monkeypatch.setattr(horovod_doctor, "version", lambda package: "1.2.3")
    monkeypatch.setattr(horovod_doctor, "import_horovod", lambda: None)


@pytest.fixture
def report(d9m):
    """Return a function that runs the command and gives (exit status, findings by name)."""

    def run():
        status, out, _ = d9m("doctor", "--json")
        return status, {finding["name"]: finding for finding in json.loads(out)["findings"]}

    return run


def test_a_healthy_environment_has_no_problems(healthy, report, d9m):
    status, findings = report()
    assert status == 0
    assert "problem" not in {finding["status"] for finding in findings.values()}
    status, out, _ = d9m("doctor")
    assert status == 0
    assert out.startswith("No problems found, but 2 notes.\n\n")


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0", ":16:8"),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:2", ":4096:8"),
        ("NCCL_ALGO", "Tree,NVLS", "Ring"),
        ("TORCHINDUCTOR_DETERMINISTIC", "0", "1"),
        ("FLASH_ATTENTION_DETERMINISTIC", "0", "1"),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1", "0"),
        ("OMP_DYNAMIC", "TRUE", "false"),
        ("PL_GLOBAL_SEED", "4294967296", "4294967295"),
        ("PL_GLOBAL_SEED", "-1", "0"),
        ("PL_GLOBAL_SEED", "twelve", "12"),
        ("HOROVOD_FUSION_THRESHOLD", "67108864", "0"),
        ("HOROVOD_DISABLE_GROUP_FUSION", "0", "1"),
        ("HOROVOD_AUTOTUNE", "1", "0"),
        ("HOROVOD_HIERARCHICAL_ALLREDUCE", "1", "0"),
        ("HOROVOD_TORUS_ALLREDUCE", "1", "0"),
        ("HOROVOD_ELASTIC", "1", "0"),
    ],
)
def test_a_variable_that_allows_nondeterminism_is_found(
    healthy, report, monkeypatch, d9m, name, bad, good
):
    assert report()[1][name]["found"].startswith("not set")
    monkeypatch.setenv(name, bad)
    status, output, _ = d9m("doctor")
    assert status == 1
    assert output.startswith(f"1 problem found.\n\n✗  {name}: {bad}\n")
    assert "\n   Fix: " in output
    monkeypatch.setenv(name, good)
    status, findings = report()
    assert status == 0
    assert findings[name] == {
        "name": name, "status": "ok", "found": good, "reason": "", "fix": "", "shell": ""
    }  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", ["", "0", "1", ":16:8", "NVLS"])
def test_the_doctor_and_a_session_agree(healthy, report, monkeypatch, name, value):
    monkeypatch.setattr(variables, "_state", variables._VariableState())
    monkeypatch.setenv(name, value)
    try:
        early = variables.EarlyVariables()
        early.set()
        early.restore()
    except SettingError:
        refused = True
    else:
        refused = False
    status, findings = report()
    assert status == int(refused)
    assert findings[name]["status"] == ("problem" if refused else "ok")


def test_horovod_that_cannot_be_imported_is_found(healthy, report, monkeypatch):
    def fail():
        raise SettingError("refused") from ImportError("no mpi_lib_v2")

    assert report()[1]["Horovod"]["status"] == "ok"
    monkeypatch.setattr(horovod_doctor, "import_horovod", fail)
    status, findings = report()
    assert status == 1
    assert findings["Horovod"]["found"] == "1.2.3, which cannot be imported (no mpi_lib_v2)"
    assert findings["Horovod"]["fix"] == "d9m install-horovod"


def test_a_missing_lightning_is_noted_and_horovod_not_looked_at(healthy, report, monkeypatch):
    def missing(package):
        raise PackageNotFoundError(package)

    assert report()[1]["Lightning"]["status"] == "ok"
    monkeypatch.setattr(horovod_doctor, "version", missing)
    status, findings = report()
    assert status == 0
    assert findings["Lightning"]["status"] == "note"
    assert not [name for name in findings if name.upper().startswith("HOROVOD")]


@pytest.mark.parametrize(
    ("owner", "attribute", "value", "name", "status"),
    [
        (torch, "__version__", "2.3.1+cpu", "torch", "problem"),
        (torch, "__version__", "2.9.1", "torch", "note"),
        (torch, "__version__", "2.11.0a0+git1", "torch", "ok"),
        (torch, "__version__", "3.0.0", "torch", "ok"),
        (torch.version, "hip", "6.4", "torch", "note"),
        (torch.backends.cudnn, "benchmark", True, "cuDNN benchmark", "problem"),
        (torch.backends.cudnn, "benchmark", False, "cuDNN benchmark", "ok"),
    ],
)
def test_the_state_of_torch_is_judged(
    healthy, report, monkeypatch, owner, attribute, value, name, status
):
    monkeypatch.setattr(owner, attribute, value)
    found = report()
    assert (found[0], found[1][name]["status"]) == (int(status == "problem"), status)


@pytest.mark.parametrize(
    ("first", "address", "interface", "status"),
    [
        ("10.0.0.1", "127.0.1.1", None, "problem"),
        ("10.0.0.1", None, None, "problem"),
        ("10.0.0.1", "10.0.0.2", None, "ok"),
        ("10.0.0.1", "127.0.1.1", "eth0", "ok"),
        ("127.0.0.1", "127.0.1.1", None, None),
    ],
)
def test_an_address_that_other_hosts_cannot_reach_is_found(
    healthy, report, monkeypatch, first, address, interface, status
):
    def resolve(name):
        if address is None:
            raise OSError(name)
        return address

    monkeypatch.setattr(doctor.socket, "gethostbyname", resolve)
    monkeypatch.setenv("MASTER_ADDR", first)
    if interface:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    found = report()[1].get("GLOO_SOCKET_IFNAME")
    assert (None if found is None else found["status"]) == status


def test_deterministic_algorithms_may_be_on_or_off(healthy, report):
    assert report()[1]["deterministic algorithms"]["found"].startswith("off")
    torch.use_deterministic_algorithms(True)
    try:
        assert report()[1]["deterministic algorithms"]["found"] == "on"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def precision():
    """Return torch's settings of reduced precision, and restore them after the test."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    names = [(backend, "fp32_precision") for backend in (cuda, cudnn.conv, cudnn.rnn)]
    names += [(cuda, f"allow_{dtype}_reduced_precision_reduction") for dtype in ("fp16", "bf16")]
    before = [getattr(*name) for name in names]
    yield names
    for name, value in zip(names, before, strict=True):
        setattr(*name, value)


def test_reduced_precision_is_noted_until_it_is_off(healthy, report, precision):
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    finding = report()[1]["precision"]
    assert finding["status"] == "note"
    assert finding["found"].startswith("TF32 in matrix products, ")
    for backend, name in precision:
        setattr(backend, name, "ieee" if name == "fp32_precision" else False)
    assert report()[1]["precision"]["status"] == "ok"


def test_threads_are_noted_until_they_are_fixed(healthy, report, monkeypatch):
    for value in (None, "", "four"):  # torch ignores text that is not a number
        if value is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert report()[1]["CPU threads"]["status"] == "note"
    for value in ("2", "2,1"):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert report()[1]["CPU threads"]["status"] == "ok"


def test_lines_fit_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    finding = CheckResult("a name", "problem", "value " * 30, "reason " * 30, "fix " * 30)
    lines = format_findings([finding]).splitlines()
    assert 70 < max(map(len, lines)) <= 80
    assert lines[0].startswith("✗  a name: value")
    assert all(line.startswith("   ") for line in lines[1:])


def test_the_printed_commands_fix_what_variables_can_fix(healthy, monkeypatch, d9m, forking_python):
    monkeypatch.setenv("NCCL_ALGO", "NVLS")
    monkeypatch.setenv("PL_GLOBAL_SEED", "twelve")
    monkeypatch.setenv("OMP_DYNAMIC", "true")
    assert d9m("doctor")[1].endswith(
        '\n\nNext:\n  eval "$(d9m doctor --fix)"  fixes what variables can fix\n'
    )
    status, shell, _ = d9m("doctor", "--fix")
    assert status == 0
    assert "unset PL_GLOBAL_SEED\n" in shell
    done = subprocess.run(
        ["bash", "-c", f'{shell}\nexec "$0" -m lightning_d9m doctor --json', forking_python],
        capture_output=True,
        text=True,
        check=False,
    )
    found = {entry["name"]: entry["status"] for entry in json.loads(done.stdout)["findings"]}
    fixed = ("NCCL_ALGO", "PL_GLOBAL_SEED", "OMP_DYNAMIC", "CPU threads")
    assert {name: found[name] for name in fixed} == dict.fromkeys(fixed, "ok")


def test_a_device_is_tried_in_a_session(healthy, report, monkeypatch):
    """If torch finds one; any warning is a problem, and what a session sets is restored."""
    assert not [name for name in report()[1] if name.startswith("device")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device, "try_device", lambda _: try_device(torch.device("cpu")))
    status, findings = report()
    assert (status, findings["device cpu"]["status"]) == (0, "ok")
    assert "digests and patched ops are the CPU's (checked in" in findings["device cpu"]["found"]
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        (lambda tensors: [len(tensors), object()], "digests on the device differ from those of"),
        (lambda _: warnings.warn("The kernel x:y cannot be used", stacklevel=1), "The kernel x:y"),
        (lambda _: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
)
def test_what_a_tried_device_does_wrong_is_a_problem(planted, found, monkeypatch):
    monkeypatch.setattr(device, "digest_many", planted)
    result = try_device(torch.device("cpu"))
    assert result.status == "problem"
    assert result.found.startswith(found)


def test_patched_ops_of_a_tried_device_are_compared(monkeypatch):
    """By the kernels: those that cannot be used are named, and another result is a problem."""

    def fail(path):
        raise RuntimeError(f"no {path}")

    computed = []

    def compute(where):
        computed.append(compute_examples(where))
        return [part + (len(computed) == 3) for part in computed[-1]]

    monkeypatch.setattr(launch, "_load", fail)
    monkeypatch.setattr(launch, "_device_types", {"cpu"})
    monkeypatch.setattr(launch, "_withdrawn", set())
    monkeypatch.setattr(device, "compute_examples", compute)
    with patches_applied("CPU"):
        found = try_device(torch.device("cpu")).found
        for path in ("kernels:accumulate", "kernels:add_taps"):
            assert f"The Triton kernel {path} cannot be used (RuntimeError: no {path})" in found
        assert "patched ops on the device differ" not in found
        assert "patched ops on the device differ" in try_device(torch.device("cpu")).found


def test_problems_come_first_and_notes_second(healthy, report, monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "NVLS")
    monkeypatch.setenv("HOROVOD_AUTOTUNE", "1")
    statuses = [finding["status"] for finding in report()[1].values()]
    assert statuses == sorted(statuses, key=["problem", "note", "ok"].index)
    assert statuses.count("problem") == 2
