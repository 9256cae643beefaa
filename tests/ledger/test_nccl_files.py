"""Files of NCCL in the stack: by content alone."""

import pytest

from lightning_d9m.ledger import nccl_files
from lightning_d9m.ledger.stack import capture_stack, stack_differences


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """Return a folder; this machine's own files are hidden."""
    monkeypatch.setattr(nccl_files, "_SYSTEM", str(tmp_path / "nccl.conf"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    for name in (*nccl_files._NAMED, nccl_files._USER):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize("name", [*nccl_files._NAMED, nccl_files._USER])
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


def test_the_files_of_the_user_and_of_the_machine_are_found(machine):
    (machine / "nccl.conf").write_text("NCCL_ALGO=Tree\n")
    assert set(nccl_files.capture_nccl_files()) == {"file.nccl.conf"}
    (machine / "home" / ".nccl.conf").write_text("NCCL_ALGO=Ring\n")
    found = nccl_files.capture_nccl_files()
    assert set(found) == {"file.nccl.conf", "file.NCCL_CONF_FILE"}
    assert len(set(found.values())) == 2


def test_a_file_that_cannot_be_read_has_no_field(machine, monkeypatch):
    """As NCCL, which continues without it."""
    monkeypatch.setenv("NCCL_GRAPH_FILE", str(machine / "missing"))
    monkeypatch.setenv("NCCL_TOPO_FILE", str(machine))
    assert nccl_files.capture_nccl_files() == {}
