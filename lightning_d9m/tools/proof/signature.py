"""Signatures of statements, by the package ``model-signing`` of OpenSSF.

A signature is a bundle of Sigstore beside the file, with an envelope (DSSE) that names the file's
SHA-256, so ``model_signing verify`` accepts it without this package.
"""

from pathlib import Path
from types import ModuleType

from lightning_d9m.errors import SettingError

SUFFIX = ".sig"
_INSTALL = "Install it: pip install 'lightning-d9m[proof]'"


def sign(path: Path, key: Path | None) -> Path:
    """Sign a file with a private key (PEM, of an elliptic curve), or without one by Sigstore.

    Returns:
        The file of the signature, beside the other one.

    Raises:
        SettingError: If ``model-signing`` is not installed, or the key cannot be used.
    """
    signing, _ = _load()
    target = path.with_name(path.name + SUFFIX)
    config = signing.Config()
    try:
        if key is None:
            config.use_sigstore_signer()
        else:
            config.use_elliptic_key_signer(private_key=key)
        config.sign(path, target)
    except Exception as error:
        raise SettingError(
            f"{path} cannot be signed with {key or 'Sigstore'}: {error}. Give a private key of an "
            "elliptic curve, such as openssl ecparam -name prime256v1 -genkey -noout makes."
        ) from error
    return target


def verify(path: Path, key: Path | None, identity: str = "", provider: str = "") -> str:
    """Return why the signature of a file is not that of a public key, or of an identity.

    Empty if it is. ``provider`` is the address of the service that confirms the identity.
    """
    _, verifying = _load()
    signature = path.with_name(path.name + SUFFIX)
    if not signature.is_file():
        return f"{path} has no signature: {signature} is not there."
    config = verifying.Config()
    try:
        if key is None:
            config.use_sigstore_verifier(identity=identity, oidc_issuer=provider)
        else:
            config.use_elliptic_key_verifier(public_key=key)
        config.verify(path, signature)
    except Exception:  # noqa: BLE001 - of any library below: nothing but success verifies
        return f"{signature} is not a signature of {path}, as it is now, by {key or identity}."
    return ""


def _load() -> tuple[ModuleType, ModuleType]:
    try:
        from model_signing import signing, verifying
    except ImportError as error:
        text = f"Signatures need the package model-signing ({error}). {_INSTALL}"
        raise SettingError(text) from error
    return signing, verifying
