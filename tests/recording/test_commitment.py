"""A run commits to what was there when it began, and to its values, as hashlib hashes them."""

import hashlib
import subprocess
import sys
from pathlib import Path
from threading import Lock
from types import ModuleType, SimpleNamespace

import pytest
import torch

from lightning_d9m.engine.probes.training import Training
from lightning_d9m.engine.recording import commitment
from lightning_d9m.engine.recording.commitment import (
    chain_batch,
    find_sources,
    hash_named,
    hash_state,
    hash_values,
)


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Return a file of the program, whose module is loaded, and a function that names words."""
    monkeypatch.chdir(tmp_path)
    file, module = tmp_path / "own.py", ModuleType("own_program")
    file.write_text("x = 1\n")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "own_program", module)
    return file, lambda *words: monkeypatch.setattr(sys, "argv", ["train.py", *words])


def test_a_file_that_is_edited_during_the_run_counts_as_it_was(program):
    file, _ = program
    before = find_sources()
    file.write_text("x = 2\n")
    known = hashlib.sha256(b"x = 1\n").hexdigest()
    assert before.program["own.py"] == find_sources(before).program["own.py"] == known
    file.unlink()  # as generated code may be
    assert "own.py" not in find_sources().program
    assert find_sources(before).program["own.py"] == known


def test_files_that_the_command_names_count_if_they_stay(program, tmp_path):
    _, name = program
    (tmp_path / "config.yaml").write_text("a: 1")
    (tmp_path / "log").write_text("")
    name("--config=config.yaml", "log", "x" * 300, "nothing\0", "")
    before = find_sources()
    (tmp_path / "log").write_text("written")
    (tmp_path / "nothing").write_text("new")
    found = find_sources(before)
    assert found.named == {"config.yaml": hashlib.sha256(b"a: 1").hexdigest()}
    assert found.gaps["file log"] == "the run has changed it"


def test_a_file_that_is_named_and_loaded_is_not_called_changed(program):
    """As of a launcher whose command names the script."""
    file, name = program
    name("own.py")
    before = find_sources()
    assert "file own.py" not in find_sources(before).gaps
    file.write_text("x = 2\n")
    assert find_sources(before).gaps["file own.py"] == "the run has changed it"


def test_the_place_of_a_module_and_not_its_name_says_whose_it_is(program, tmp_path, monkeypatch):
    """Each is hashed, or of a package or module that is, or is named."""
    names = ("torchdata/__init__.py", "lib/loose.py", "lib/space/part/a.py", "lib/whole/b/c.py")
    for place in (*names, "lib/space/part/__init__.py", "lib/whole/__init__.py", "cache/own.so"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text("x = 1\n")
    modules = ("torchdata", "loose", "space.part.a", "whole.b.c")
    known = dict(zip(modules, names, strict=True)) | {
        "built": "cache/own.so",
        "zipped": "a.zip/a.py",
    }
    for module in [name for name in sys.modules if name.startswith("torchdata.")]:
        monkeypatch.delitem(sys.modules, module)  # the package, which another test has loaded
    for module, place in known.items():
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
        sys.modules[module].__file__ = str(tmp_path / place)
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))  # as from standard input
    here = tmp_path / "torchdata"
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(tmp_path / "lib")
    found = find_sources()
    assert found.program == {"__init__.py": hashlib.sha256(b"x = 1\n").hexdigest()}
    assert {"loose.py", "space/part", "whole", "torch"} <= {*found.used}
    assert not {"os.py", "json", "torchdata", "space"} & {*found.used}
    # Other tests may have loaded modules, too, whose code is in no file.
    lost = ("own_program", "built", "zipped", "__main__")
    assert {f"module {name}" for name in lost} <= {*found.gaps}
    assert not {f"module {name}" for name in (*modules, "torch", "json")} & {*found.gaps}
    assert found.gaps["module built"] == "its code is in no file of a folder of sys.path"


def test_a_program_may_leave_the_folder_in_which_it_began(program, tmp_path, monkeypatch):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/train.py").write_text("x = 2\n")
    (tmp_path / "config.yaml").write_text("a: 1")
    main = str(tmp_path / "scripts/train.py")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", main, raising=False)
    monkeypatch.setattr(sys, "argv", ["scripts/train.py", "config.yaml"])
    before = find_sources()
    assert {"own.py", "scripts/train.py"} == {*before.program}
    assert {*before.named} == {"config.yaml"}
    monkeypatch.chdir("/")
    assert find_sources() == before


def test_a_program_that_begins_in_the_root_does_not_own_all_files(program, monkeypatch):
    monkeypatch.syspath_prepend(program[0].parent)
    monkeypatch.chdir("/")
    found = find_sources()
    assert not any(name.endswith("own.py") for name in found.program)
    assert {"own.py", "torch"} <= {*found.used}


def test_a_module_that_waits_for_its_first_use_is_not_loaded(program, monkeypatch):
    class Lazy(ModuleType):
        def __getattribute__(self, name):
            raise ImportError(name)

    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    monkeypatch.setitem(sys.modules, "other", object())
    assert "module lazy" not in find_sources().gaps


def test_a_linked_folder_is_of_what_it_leads_to_and_a_linked_file_has_its_name(
    program, tmp_path, monkeypatch
):
    file, _ = program
    monkeypatch.setattr(commitment, "_INSTALLED", [f"{tmp_path}/real/site-packages/"])
    monkeypatch.syspath_prepend(tmp_path / "path")
    for folder, module in (("project/mypkg", "linked"), ("real/site-packages/other", "installed")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text("x = 1\n")
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages/mypkg").symlink_to(tmp_path / "project/mypkg")
    (tmp_path / "path").symlink_to(tmp_path / "real/site-packages")
    (tmp_path / "v1.py").symlink_to(file)
    sys.modules["linked"].__file__ = str(tmp_path / "site-packages/mypkg/a.py")
    sys.modules["installed"].__file__ = str(tmp_path / "path/other/a.py")
    sys.modules["own_program"].__file__ = str(tmp_path / "v1.py")
    own = {"a.py", "v1.py", "own.py"}
    sources = find_sources()
    found = {name for name in sources.program if Path(name).name in own}
    assert found == {"project/mypkg/a.py", "v1.py"}
    assert "other/a.py" in sources.used


def test_packages_are_those_that_python_imports(program, tmp_path, monkeypatch):
    for folder, version in (("first", "1.0"), ("second", "2.0"), ("second", "")):
        info = tmp_path / folder / f"doubled-{version or 'broken'}.dist-info"
        info.mkdir(parents=True)
        if version:
            (info / "METADATA").write_text(f"Name: doubled\nVersion: {version}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "first"), str(tmp_path / "second")])
    assert find_sources().packages == {"doubled": "1.0"}


def test_a_batch_is_hashed_with_its_names_and_says_what_has_no_bytes():
    one, two, unhashed = torch.zeros(3), torch.ones(3), set()
    swapped = ({"image": one, "mask": two}, {"mask": one, "image": two})
    assert len({chain_batch("", batch, unhashed) for batch in swapped}) == 2
    assert not unhashed
    images = (SimpleNamespace(pixels=value) for value in (one, two))
    assert len({chain_batch("", {"image": image}, unhashed) for image in images}) == 2
    assert not unhashed
    chain_batch("", {"image": one, "a": (number for number in [1])}, unhashed)
    assert unhashed == {"builtins.generator"}
    known = "not all of it can be read"
    assert find_sources(None, unhashed).gaps["value of type builtins.generator"] == known


def test_the_buffers_of_a_state_dict_are_weights():
    def hash_weights(model):
        return hash_state(Training(model), "", set())["weights_sha256"]

    model = torch.nn.BatchNorm1d(2)
    before = hash_weights(model)
    assert before == hash_named(model.state_dict())[:32]
    model.register_buffer("own", torch.ones(1), persistent=False)
    assert hash_weights(model) == before
    model.running_mean += 1
    assert hash_weights(model) != before


def test_a_tensor_is_hashed_with_its_header_in_row_major_order():
    header = b"d9m-digest-1 float32 [2,3]\n"
    x = torch.arange(6.0).reshape(3, 2).t()
    expected = hashlib.sha256(b"S5:startT" + header + x.contiguous().numpy().tobytes()).hexdigest()
    assert hash_values(["start", x]) == expected


def test_types_shapes_and_bits_count():
    values = (
        *(1, 1.0, True, "1", None, [1], (1,), {"a": 1}, torch.ones(2), torch.ones(1, 2)),
        *(torch.zeros(1), -torch.zeros(1), torch.ones(2, dtype=torch.int32), torch.eye(2)),
        *(torch.eye(2).to_sparse(), torch.tensor(1j).conj(), torch.ones(2, dtype=torch.bfloat16)),
    )
    assert len({hash_values([value]) for value in values}) == len(values)
    assert hash_values([torch.ones(2), 1]) != hash_values([1, torch.ones(2)])


def test_of_an_object_without_bytes_the_type_counts():
    unhashed, meta = set(), torch.ones(1, device="meta")
    same = hash_values([Lock()], unhashed), hash_values([Lock()]), hash_values([type(Lock())])
    assert len({*same}) == 1 != len({same[0], hash_values([lambda: 0])})
    assert hash_values([meta], unhashed) == hash_values([meta])
    assert unhashed == {"_thread.lock", "torch.Tensor"}


def test_values_by_name_are_hashed_on_threads_in_any_order(monkeypatch):
    values = {"b": torch.arange(100.0), ("a", "c"): 1, "d": None, "e": torch.eye(3)}
    known = hash_values([{name: hash_values([value]) for name, value in values.items()}])
    for threads in (1, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)  # noqa: B023 - called here
        assert hash_named(values) == known
    assert hash_named(dict(reversed(values.items()))) == known
    assert hash_named({**values, "d": 0}) != known


def test_a_process_that_ends_starts_no_threads(forking_python):
    """A loop without a Recorder records its last state there."""
    code = (
        "import atexit, torch; from lightning_d9m.engine.recording.commitment import hash_named\n"
    )
    code += "torch.set_num_threads(2)\n"
    code += "atexit.register(lambda: print(hash_named({'a': 1, 'b': 2})))"
    done = subprocess.run([forking_python, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == hash_named({"a": 1, "b": 2})
