"""Signatures of statements, by the command of the package ``model-signing`` of OpenSSF.

A signature is a bundle of Sigstore beside the file, with an envelope (DSSE) that names the file's
SHA-256. A method is what that command takes between ``sign`` or ``verify`` and the file, so that
keys, certificates and identities that Sigstore knows can be used as there.
"""

import shlex
import subprocess
import sys
from pathlib import Path

from lightning_d9m.errors import SettingError

# Without the working folder, whose modules Python would import first: it may be the publisher's.
_COMMAND = """
import runpy, sys
sys.path[:] = filter(None, sys.path)
runpy.run_module("model_signing", run_name="__main__", alter_sys=True)
"""


def sign(path: Path, method: str) -> str:
    """Sign a file; return the path of the signature, beside it.

    Raises:
        SettingError: If ``model-signing`` is not installed, or the method cannot be used.
    """
    if problem := _run("sign", path, method):
        raise SettingError(
            f"{path} is written and cannot be signed with {method}: {problem}. Install "
            "'lightning-d9m[proof]', and give the words of model_signing sign, such as sigstore, "
            "or with a private key of an elliptic curve: key --private_key FILE."
        )
    return f"{path}.sig"


def verify(path: Path, method: str | None) -> list[str]:
    """Return why the signature of a file is not valid; nothing if it is, or without a method."""
    problem = _run("verify", path, method) if method else ""
    return [f"{path}, as it is now, has no valid signature by {method}: {problem}."] * bool(problem)


def _run(verb: str, path: Path, method: str) -> str:
    """Run the command; return the last line that it prints if it fails."""
    words = [sys.executable, "-c", _COMMAND, verb, *shlex.split(method)]
    words += ["--signature", f"{path}.sig", str(path)]
    # Without keys, it may open a browser or ask for a code, so that its words must be seen.
    if verb == "sign" and sys.stdin.isatty():
        return f"exit status {status}" if (status := subprocess.call(words, stdout=2)) else ""
    done = subprocess.run(words, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    text = done.stdout.decode(errors="replace").strip() or f"exit status {done.returncode}"
    return text.rpartition("\n")[2] if done.returncode else ""
