"""Signatures of statements, by the command of the package ``model-signing`` of OpenSSF.

A signature is a bundle of Sigstore beside the file, with an envelope (DSSE) that names the file's
SHA-256.
"""

import subprocess
import sys
from pathlib import Path

from lightning_d9m.errors import SettingError


def sign(path: Path, key: Path | None) -> Path:
    """Sign a file with a private key (PEM, of an elliptic curve), or without one by Sigstore.

    Returns:
        The file of the signature, beside the other one.

    Raises:
        SettingError: If ``model-signing`` is not installed, or the key cannot be used.
    """
    options = ["sigstore"] if key is None else ["key", "--private_key", str(key.absolute())]
    if problem := _run("sign", path, options):
        raise SettingError(
            f"{path} cannot be signed with {key or 'Sigstore'}: {problem}. Install "
            "'lightning-d9m[proof]', and give a private key of an elliptic curve, such as openssl "
            "ecparam -name prime256v1 -genkey -noout makes."
        )
    return path.with_name(f"{path.name}.sig")


def verify(path: Path, key: Path | None, identity: str | None, provider: str | None) -> str:
    """Return why the signature of a file is not that of a public key, or of an identity.

    Empty if it is. ``provider`` is the address of the service that confirms the identity.
    """
    options = ["sigstore", "--identity", str(identity), "--identity_provider", str(provider)]
    problem = _run(
        "verify", path, options if key is None else ["key", "--public_key", str(key.absolute())]
    )
    signer = key or identity
    return problem and f"{path} has no valid signature, as it is now, by {signer}: {problem}."


def _run(verb: str, path: Path, options: list[str]) -> str:
    """Run a command; return the last line that it prints if it fails."""
    file = str(path.absolute())
    words = [sys.executable, "-m", "model_signing", verb, *options, "--signature", f"{file}.sig"]
    # Not in the working folder, whose modules Python would import first: it may be the publisher's.
    done = subprocess.run(
        [*words, file],
        check=False,
        cwd=sys.prefix,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    text = done.stdout.decode(errors="replace").strip() or f"exit status {done.returncode}"
    return text.rpartition("\n")[2] if done.returncode else ""
