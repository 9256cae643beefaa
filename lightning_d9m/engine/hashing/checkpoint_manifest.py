"""The manifest of a checkpoint: one digest for each tensor, to find and name damage."""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_d9m.engine.hashing.digest import DigestQueue, digest_value
from lightning_d9m.engine.hashing.nested_values import read_container
from lightning_d9m.errors import CheckpointError
from lightning_d9m.text import describe_names, quote

# Another one where other bytes are hashed: an older manifest would call any file damaged.
_VERSION = 5
_PLAIN_KEYS = (str, int, float, bytes, type(None))
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def make_manifest(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest of a checkpoint's content, of plain values.

    Args:
        content: Nested containers; see ``read_container``. For any other object only its type is
            hashed.

    Returns:
        ``"version"``: that of this format; ``"tensors"``: the digest of each tensor by its key;
        ``"values"``: the digest of the list of [key, digest] of all others.
    """
    tensors, values = _digest_content(content)
    digests = {key: digest for key, (_, digest) in tensors.items()}
    return {"version": _VERSION, "tensors": digests, "values": values}


def digest_manifest(manifest: Mapping[str, Any] | None) -> str:
    """Return the digest of a manifest, 32 hex digits: one for all that the checkpoint holds.

    Empty without a manifest.
    """
    return "" if manifest is None else digest_value(manifest)


def check_manifest(
    content: Mapping[str, Any], manifest: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Compare a checkpoint's content with its manifest.

    Returns:
        What differs, in words; and the paths of tensors whose bytes, shape or dtype differ.

    Raises:
        CheckpointError: If the manifest has another version.
    """
    version = manifest.get("version", 1)
    if version != _VERSION:
        raise CheckpointError(
            f"The checkpoint's manifest has version {quote(version)}; this version of "
            f"lightning_d9m reads version {_VERSION}. Use the version that saved it."
        )
    expected = dict(manifest["tensors"])
    tensors, values = _digest_content(content)
    changed, added = [], []
    for key, (path, digest) in tensors.items():
        if key not in expected:
            added.append(path)
        elif expected.pop(key) != digest:
            changed.append(path)
    differ = "1 tensor differs" if len(changed) == 1 else f"{len(changed)} tensors differ"
    problems = {
        f"{differ} from what was saved: {describe_names(changed, len(changed))}": changed,
        f"{len(expected)} of the saved tensors are missing": expected,
        f"it holds tensors that were not saved: {describe_names(added, len(added))}": added,
        "numbers or strings in it differ from those that were saved": values != manifest["values"],
    }
    return [text for text, found in problems.items() if found], changed


def _digest_content(content: Mapping[str, Any]) -> tuple[dict[str, tuple[str, str]], str]:
    """Return path and digest of each tensor by its key, and the digest of all other values."""
    leaves: list[tuple[str, str, object]] = []
    _collect_leaves(content, "", "", (), leaves)
    # A parameter that no batch has given a shape yet counts by its type, like other objects.
    tensors = {
        key: (path, leaf)
        for path, key, leaf in leaves
        if isinstance(leaf, Tensor) and not is_lazy(leaf)
    }
    others = {key: leaf for _, key, leaf in leaves if key not in tensors}
    # A tensor without bytes is an error. Another object without bytes, which a callback may save,
    # counts by its type.
    queue = DigestQueue()
    queue.add(tensor for _, tensor in tensors.values())
    queue.add_leaves(others.values())
    digests = iter(queue.fetch())
    named = {key: (path, next(digests)) for key, (path, _) in tensors.items()}
    return named, digest_value([*zip(others, digests, strict=True)])


def _collect_leaves(
    value: object, path: str, key: str, above: tuple[int, ...], out: list[tuple[str, str, object]]
) -> None:
    """Append the dotted path, the key and the leaf of each leaf of a container, depth first.

    Several leaves may have the same path, as below a dict with the key ``a.b``, and none the same
    key. An empty container is not a leaf; one that holds itself is, where it occurs again.
    """
    container = None if id(value) in above else read_container(value)
    if container is None:
        out.append((path, key, value))
        return
    left, right = "{}" if isinstance(value, Mapping) else "[]"
    for number, (name, entry) in enumerate(container[1]):
        # The repr of another object, as of a function, may hold its address, which is another one
        # when the checkpoint is loaded; the order of a dict is kept, and tells two of them apart.
        is_plain = _is_plain(name)
        shown = repr(name) if is_plain else f"<{number}: {_ADDRESS.sub('', str(name))}>"
        below = f"{path}.{name}" if path else f"{name}"
        _collect_leaves(entry, below, f"{key}{left}{shown}{right}", (*above, id(value)), out)


def _is_plain(key: object) -> bool:
    """Return whether the repr of a key names it."""
    return isinstance(key, _PLAIN_KEYS) or (isinstance(key, tuple) and all(map(_is_plain, key)))
