"""Signatures: what cannot be used is named."""

import subprocess
import sys

import pytest

from lightning_d9m.errors import SettingError
from lightning_d9m.tools.proof.signature import sign, verify


def test_a_key_that_is_none(tmp_path, monkeypatch):
    file, key = tmp_path / "proof.json", tmp_path / "key.pem"
    file.write_text("{}")
    key.write_text("no key")
    # A module of the working folder, which may be the publisher's, does not verify.
    (tmp_path / "model_signing.py").write_text("raise SystemExit(0)")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingError, match=r"cannot be signed with .*Unable to load PEM"):
        sign(file, "key --private_key key.pem")
    (tmp_path / "proof.json.sig").write_text("{}")
    assert "has no valid signature by key" in verify(file, "key --public_key key.pem")[0]


def test_the_package_that_signs_is_absent(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONNOUSERSITE", "1")
    monkeypatch.setattr(sys, "executable", sys._base_executable)
    with pytest.raises(SettingError, match=r"No module named model_signing\. Install"):
        sign(tmp_path / "proof.json", "sigstore")


def test_a_method_is_words_of_the_command(tmp_path, monkeypatch):
    used = []

    def run(words, **_):
        used.append(words[3:])
        return subprocess.CompletedProcess(words, 0, b"succeeded")

    monkeypatch.setattr(subprocess, "run", run)
    file = tmp_path / "proof.json"
    assert sign(file, "sigstore") == f"{file}.sig"
    assert verify(file, "sigstore --identity 'my job'") == []
    files = ["--signature", f"{file}.sig", str(file)]
    assert used[0] == ["sign", "sigstore", *files]
    assert used[1] == ["verify", "sigstore", "--identity", "my job", *files]
