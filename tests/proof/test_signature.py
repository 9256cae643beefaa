"""Signatures: what cannot be used is named."""

import sys

import pytest

from lightning_d9m.errors import SettingError
from lightning_d9m.tools.proof.signature import sign, verify


def test_a_key_that_is_none(tmp_path):
    file, key = tmp_path / "proof.json", tmp_path / "key.pem"
    file.write_text("{}")
    key.write_text("no key")
    with pytest.raises(SettingError, match="cannot be signed with"):
        sign(file, key)
    (tmp_path / "proof.json.sig").write_text("{}")
    assert "is not a signature of" in verify(file, key)


def test_the_package_that_signs_is_absent(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "model_signing", None)
    with pytest.raises(SettingError, match=r"pip install 'lightning-d9m\[proof\]'"):
        sign(tmp_path / "proof.json", None)


def test_without_a_key_sigstore_signs(tmp_path, monkeypatch):
    from model_signing import signing

    used = []
    monkeypatch.setattr(signing.Config, "use_sigstore_signer", lambda *_: used.append("signer"))
    monkeypatch.setattr(signing.Config, "sign", lambda _, *paths: used.extend(paths))
    sign(tmp_path / "proof.json", None)
    assert used == ["signer", tmp_path / "proof.json", tmp_path / "proof.json.sig"]
