"""Statements: a method of signing is words of another package's command, and its errors show."""

import subprocess
import sys

import pytest

from lightning_d9m.errors import SettingError
from lightning_d9m.tools.proof.training import (
    Proof,
    ProvenTraining,
    read_statement,
    write_statement,
)

PROOF = Proof(
    "https://in-toto.io/Statement/v1",
    "urn:lightning-d9m:training:1",
    [],
    ProvenTraining("run", {}, [], {"a": "0" * 64}, {}),
)


@pytest.fixture
def sign(tmp_path):
    """Return a function that writes a signed statement, and one that reads it."""
    file = tmp_path / "proof.json"

    def write(method):
        return write_statement(file, PROOF, method)

    return write, lambda method: read_statement(file, Proof, method)


def test_a_key_that_is_none(tmp_path, monkeypatch, sign):
    write, read = sign
    (tmp_path / "key.pem").write_text("no key")
    # A module of the working folder, which may be the publisher's, does not verify.
    for name in ("model_signing.py", "runpy.py"):
        (tmp_path / name).write_text("raise SystemExit(0)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ".")
    with pytest.raises(SettingError, match=r"does not sign .* by .*Unable to load PEM"):
        write(["key", "--private_key", "key.pem"])
    assert not (tmp_path / "proof.json").exists()  # nobody takes it for a signed one
    write(None)
    (tmp_path / "proof.json.sig").write_text("{}")
    for words, said in (
        (["key", "--public_key", "key.pem"], "Unable to load PEM"),
        (["key", "--public_key", "none.pem"], "No such file or directory: 'none.pem'"),
        (["key", "--public"], "No such option"),
    ):
        with pytest.raises(SettingError, match=f"does not verify .* by key .*{said}"):
            read(words)


def test_the_package_that_signs_is_absent_or_elsewhere(tmp_path, monkeypatch, sign):
    monkeypatch.setenv("PYTHONNOUSERSITE", "1")
    monkeypatch.setattr(sys, "executable", sys._base_executable)
    with pytest.raises(SettingError, match=r"No module named model_signing\. Install"):
        sign[0](["sigstore"])
    sign[0](None)
    (tmp_path / "proof.json.sig").write_text("{}")
    with pytest.raises(SettingError, match=r"No module named model_signing\. Install"):
        sign[1](["sigstore"])
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed/model_signing.py").write_text("raise SystemExit(0)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "installed"))
    assert sign[1](["sigstore"]) == PROOF


def test_a_method_is_words_of_the_command(tmp_path, monkeypatch, sign):
    used = []

    def run(words, **_):
        used.append(words[3:])
        return subprocess.CompletedProcess(words, 0, b"succeeded")

    monkeypatch.setattr(subprocess, "run", run)
    file, (write, read) = tmp_path / "proof.json", sign
    write(None)
    write(["sigstore"])
    assert read(["sigstore", "--identity", "my job"]) == read(None) == PROOF
    files = ["--signature", f"{file}.sig", str(file)]
    assert used == [
        ["sign", "sigstore", *files],
        ["verify", "sigstore", "--identity", "my job", *files],
    ]
