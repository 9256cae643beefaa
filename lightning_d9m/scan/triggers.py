r"""Which lines of a source can hold a finding: told by their words, before anything is parsed.

A finding needs one of these words on one of its lines: the name that it calls or sets, or a name
that the same text binds to it, or to a set. Any other line is not looked at.
"""

import re

from lightning_d9m.scan.operations import FUNCTIONS, METHODS

_TORCH_CALLS = frozenset(
    word.encode()
    for word in (
        *(name.rpartition(".")[2] for name in FUNCTIONS),
        *METHODS,
        *["use_deterministic_algorithms", "set_deterministic_debug_mode", "DeterminismCallback"],
        *[
            "empty",
            "empty_like",
            "empty_strided",
            "new_empty",
            "Tensor",
            "FloatTensor",
            "DoubleTensor",
        ],
        *[
            "HalfTensor",
            "IntTensor",
            "LongTensor",
            "autotune",
            "atomic_add",
            "atomic_xchg",
            "atomic_cas",
        ],
        *[
            "atomic_max",
            "atomic_min",
            "atomic_and",
            "atomic_or",
            "atomic_xor",
            "add",
            "sub",
            "exch",
            "cas",
        ],
        *["Trainer", "flags", "compile", "Generator", "enable", "deterministic", "partial"],
        *["HorovodDeterministicStrategy"],
    )
)
_CALLS = frozenset(
    word.encode()
    for word in (
        *["seed", "manual_seed", "manual_seed_all", "seed_all", "seed_everything", "set_seed"],
        *["default_rng", "RandomState", "Random", "SeedSequence", "PCG64", "PCG64DXSM"],
        *["MT19937", "Philox", "SFC64", "SystemRandom", "choice", "randbelow", "randbits"],
        *["listdir", "scandir", "glob", "iglob", "rglob", "iterdir", "walk", "fwalk"],
        *["as_completed", "imap_unordered", "hash"],
    )
)
_CALL = re.compile(rb"\b([A-Za-z_]\w*)\b\s*\(")
# What is found without being called: settings, keywords, a variable's name.
_PLAIN = re.compile(
    rb"\b(?:benchmark|deterministic|max_autotune\w*|worker_init_fn|in_order|random_state|seed"
    rb"|random_seed|rng_seed)\s*=(?!=)|PYTHONHASHSEED|\bkey\s*=\s*hash\b"
)
# One of these is in whatever the pattern above matches.
_PLAIN_PARTS = (
    b"benchmark",
    b"deterministic",
    b"max_autotune",
    b"worker_init_fn",
    b"in_order",
    b"random_state",
    b"seed",
    b"PYTHONHASHSEED",
    b"hash",
)
_WORD = re.compile(rb"[A-Za-z_]\w*")
_TORCH = re.compile(rb"torch|lightning|triton|numba|flash_attn")
_SUPPRESSION = re.compile(rb"#\s*d9m:")
# What another name stands for: `interpolate as up`, `up = F.interpolate`, `self.make = nn.GRU`.
_RENAMED = re.compile(rb" as (\w+)")
_ASSIGNED = re.compile(rb"=[ \t]*(?:\w+\.)*(\w+)[ \t]*(?:$|#|;)", re.MULTILINE)
_LONGEST_CHAIN = 3

# A set that is made or written down, unless it is within a string; and one that is announced.
_SET = re.compile(rb"\b(?:frozen)?set\s*\(|\{\s*[^\s:{}][^:{}]*?(?:[,}]|\sfor\s)")
_NAME_BEFORE = re.compile(rb"(\w+)\s*(?::[^=\n]+)?=$")
_MARKS_BEFORE_SET = tuple(b"([*,|&^-")
_WORDS_BEFORE_SET = (b" in", b" from", b"return", b" else", b" or")
_SET_TYPE = re.compile(rb":\s*(?:typing\.|t\.)?(?:set|Set|frozenset|FrozenSet)\b")
_BEFORE_TYPE = re.compile(rb"(\w+)\s*$")
_LOOK_BACK = 100


def find_lines(text: bytes, *, torch: bool = False) -> list[int]:
    r"""Return the numbers of the lines that may hold a finding, ascending.

    Args:
        text: UTF-8, with ``\n`` between lines.
        torch: Whether it may call torch without naming it.
    """
    wanted = _CALLS | _TORCH_CALLS if torch or _TORCH.search(text) else _CALLS
    wanted = _with_aliases(text, wanted)
    offsets, sets = _find_sets(text)
    offsets += [match.start() for match in _CALL.finditer(text) if match[1] in wanted]
    if any(word in text for word in _PLAIN_PARTS):
        offsets += [match.start() for match in _PLAIN.finditer(text)]
    if sets:
        offsets += [match.start() for match in _WORD.finditer(text) if match[0] in sets]
    lines: list[int] = []
    line, before = 1, 0
    for offset in sorted(offsets):
        line += text.count(b"\n", before, offset)
        before = offset
        if not lines or lines[-1] != line:
            lines.append(line)
    return lines


def _find_sets(text: bytes) -> tuple[list[int], set[bytes]]:
    """Return where sets are made, and the names that are bound to them."""
    offsets: list[int] = []
    names: set[bytes] = set()
    for match in _SET.finditer(text):
        start = match.start()
        before = text[max(start - _LOOK_BACK, 0) : start].rstrip()
        if before.endswith(b"="):
            offsets.append(start)
            if name := _NAME_BEFORE.search(before):
                names.add(name[1])
        elif (before and before[-1] in _MARKS_BEFORE_SET) or before.endswith(_WORDS_BEFORE_SET):
            offsets.append(start)
    for match in _SET_TYPE.finditer(text):
        start = match.start()
        if named := _BEFORE_TYPE.search(text, max(start - _LOOK_BACK, 0), start):
            names.add(named[1])
    return offsets, names


def has_suppression(text: bytes) -> bool:
    """Say whether a text may hold a suppression."""
    return _SUPPRESSION.search(text) is not None


def _with_aliases(text: bytes, words: frozenset[bytes]) -> frozenset[bytes]:
    """Add the names that are bound to a word, and those that are bound to these."""
    pairs: set[tuple[bytes, bytes]] = set()
    for pattern in (_RENAMED, _ASSIGNED):
        for match in pattern.finditer(text):
            start = match.start()
            if before := _BEFORE_TYPE.search(text, max(start - _LOOK_BACK, 0), start):
                renamed = pattern is _RENAMED
                pairs.add((before[1], match[1]) if renamed else (match[1], before[1]))
    for _ in range(_LONGEST_CHAIN):
        added = {alias for word, alias in pairs if word in words} - words
        if not added:
            break
        words |= added
    return words
