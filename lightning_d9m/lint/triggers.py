r"""Search for lines that can hold a finding, by their words and before parsing.

A finding needs one of these words on one of its lines: the name that it calls or sets, or a name
that the same text binds to it, or to a set. The scan skips all other lines.
"""

import re

from lightning_d9m.lint.checks.op_table import FUNCTIONS, METHODS

_TORCH_CALLS = frozenset(
    word.encode()
    for word in (
        *(name.rpartition(".")[2] for name in FUNCTIONS),
        *METHODS,
        *["use_deterministic_algorithms", "set_deterministic_debug_mode", "DeterminismCallback"],
        *["empty", "empty_like", "empty_strided", "new_empty", "Tensor", "FloatTensor"],
        *["DoubleTensor", "HalfTensor", "IntTensor", "LongTensor", "autotune"],
        *(f"atomic_{kind}" for kind in ("add", "xchg", "cas", "max", "min", "and", "or", "xor")),
        *["Trainer", "Generator", "Thread", "Timer", "HorovodDeterministicStrategy"],
    )
)
# Frequent names that count only in a text that also has the first word.
_BESIDE: tuple[tuple[bytes, frozenset[bytes]], ...] = (
    (b"atomic", frozenset({b"add", b"sub", b"exch", b"cas"})),
    (b"benchmark", frozenset({b"flags"})),
    (b"max-autotune", frozenset({b"compile"})),
    (b"lightning_d9m", frozenset({b"enable", b"deterministic"})),
    (b"zero_grad", frozenset({b"backward"})),
    (b"Trainer", frozenset({b"fit"})),
    (b"gym", frozenset({b"reset", b"sample"})),
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
# Settings, keywords and variables, which are not calls; by a part that a quick search finds.
_PLAIN = {
    part: re.compile(pattern)
    for part, pattern in (
        (b"benchmark", rb"benchmark\s*=(?!=)"),
        (b"deterministic", rb"deterministic\s*=(?!=)"),
        (b"max_autotune", rb"max_autotune\w*\s*=(?!=)"),
        (b"worker_init_fn", rb"worker_init_fn\s*=(?!=)"),
        (b"in_order", rb"in_order\s*=(?!=)"),
        (b"random_state", rb"random_state\s*=(?!=)"),
        (b"seed", rb"seed\s*=(?!=)"),
        (b"PYTHONHASHSEED", rb"PYTHONHASHSEED"),
        (b"hash", rb"key\s*=\s*hash\b"),
        *((name, rb"\b(?:get|st_)[mca]time") for name in (b"mtime", b"ctime", b"atime")),
    )
}
# Learning rates, in a text that reads a clock.
_RATE = re.compile(
    rb"[\"']lr[\"']\s*\]|\b(?:lr|learning_rate)\s*=(?!=)|(?:Lambda|Multiplicative)LR\b"
)
_CLOCK = re.compile(rb"\bimport [^\n]*\btime\b|\bfrom time import|datetime")
# Reads of tensors by an index, in a text that makes parameters and repeated indices.
_INDEXED = re.compile(rb"\w\s*\[\s*[A-Za-z_\[:.]")
_GRADIENT = re.compile(rb"Parameter\s*\(|requires_grad|\.(?:weight|bias)\s*\[")
_REPEATED = re.compile(
    rb"randint|\.(?:long|int|int32|int64)\b|\.repeat|tensor\s*\(\s*\[|\[\s*\[\s*\d"
)
_NO_WORD = re.compile(rb"\W")
_WORD = re.compile(rb"[A-Za-z_]\w*")
_PARTIAL = re.compile(rb"partial\s*\(\s*(?:\w+\.)*(\w+)")
_TORCH = re.compile(rb"torch|lightning|triton|numba|flash_attn|gym")
_SUPPRESSION = re.compile(rb"#\s*d9m:")
# Aliases: `interpolate as up`, `up = F.interpolate`, `self.make = nn.GRU`.
_RENAMED = re.compile(rb" as (\w+)")
_ASSIGNED = re.compile(rb"=[ \t]*(?:\w+\.)*(\w+)[ \t]*(?:$|#|;)", re.MULTILINE)
_LONGEST_CHAIN = 3

# Calls of set, set displays, and annotations.
_MADE = re.compile(rb"set\s*\(")
_WRITTEN = re.compile(rb"\{\s*(?:\*|[^\s:{}][^:{}]*?(?:[,}]|\sfor\s))")
_NAME_BEFORE = re.compile(rb"(\w+)\s*(?::[^=\n]+)?=$")
_SET_TYPE = re.compile(rb":\s*(?:typing\.|t\.)?(?:set|Set|frozenset|FrozenSet)\b")
# A set's order can be visible in a loop, a call, unpacking or an operation.
_MARKS_BEFORE = tuple(b"(,*|&^-")
_WORDS_BEFORE = (b" in", b" from")
_OWNER = re.compile(rb"(?:\w+\.)+$")
_CLOSING = ord("}")
_LOOK_BACK = 100


def find_candidate_lines(text: bytes, *, torch: bool = False) -> list[int]:
    r"""Return the numbers of the lines that may hold a finding, ascending.

    ``torch`` is true if the text may call torch without naming it.
    """
    wanted = _CALLS
    if torch or _TORCH.search(text):
        wanted |= _TORCH_CALLS
        for beside, words in _BESIDE:
            if beside in text:
                wanted |= words
    wanted = _with_aliases(text, wanted)
    offsets, sets = _find_sets(text)
    offsets += [match.start() for match in _CALL.finditer(text) if match[1] in wanted]
    if b"partial" in text:
        offsets += [match.start() for match in _PARTIAL.finditer(text) if match[1] in wanted]
    patterns = [pattern for part, pattern in _PLAIN.items() if part in text]
    patterns += [_RATE] if _CLOCK.search(text) else []
    if (torch or _TORCH.search(text)) and _GRADIENT.search(text) and _REPEATED.search(text):
        patterns.append(_INDEXED)
    offsets += [match.start() for pattern in patterns for match in pattern.finditer(text)]
    if sets:
        offsets += [
            match.start()
            for match in _WORD.finditer(text)
            if match[0] in sets and _is_ordered(text, match.start(), match.end())
        ]
    lines: list[int] = []
    line, before = 1, 0
    for offset in sorted(offsets):
        line += text.count(b"\n", before, offset)
        before = offset
        if not lines or lines[-1] != line:
            lines.append(line)
    return lines


def _find_sets(text: bytes) -> tuple[list[int], set[bytes]]:
    """Return the offsets of sets that may be iterated, and the names that are bound to sets."""
    offsets: list[int] = []
    names: set[bytes] = set()
    for pattern in (_MADE, _WRITTEN):
        for match in pattern.finditer(text):
            start = match.start()
            if pattern is _MADE:
                start -= 6 if text.endswith(b"frozen", 0, start) else 0
                if start and (text[start - 1 : start].isalnum() or text[start - 1] in b"_."):
                    continue
            before = text[max(start - _LOOK_BACK, 0) : start].rstrip()
            if before.endswith(b"="):
                if name := _NAME_BEFORE.search(before):
                    names.add(name[1])
            # A single element has only one order; most of these are fields of an f-string.
            elif text[match.end() - 1] != _CLOSING and _is_ordered(text, start, match.end()):
                offsets.append(start)
    for match in _SET_TYPE.finditer(text):
        names.add(_read_before(text, match.start()))
    return offsets, names


def _is_ordered(text: bytes, start: int, end: int) -> bool:
    """Return whether the code around a set may depend on its order."""
    before = text[max(start - _LOOK_BACK, 0) : start]
    before = _OWNER.sub(b"", before).rstrip(b" \t\n")
    if before.endswith(_WORDS_BEFORE):
        # `x in {1, 2}` is a test; a loop has `for` before; `from` is part of `yield from`.
        return before.endswith(b" from") or b"for " in before
    return (bool(before) and before[-1] in _MARKS_BEFORE) or text.startswith(b".pop", end)


def has_suppression(text: bytes) -> bool:
    """Return whether a text may hold a suppression."""
    return _SUPPRESSION.search(text) is not None


def _with_aliases(text: bytes, words: frozenset[bytes]) -> frozenset[bytes]:
    """Add the aliases of the words, and the aliases of aliases."""
    imported = [(match.start(), match[1]) for match in _RENAMED.finditer(text)]
    pairs = [(_read_before(text, start), alias) for start, alias in imported]
    assigned = [(match.start(), match[1]) for match in _ASSIGNED.finditer(text)]
    for _ in range(_LONGEST_CHAIN):
        pairs += [(word, _read_before(text, start)) for start, word in assigned if word in words]
        added = {alias for word, alias in pairs if word in words and alias} - words
        if not added:
            break
        words |= added
    return words


def _read_before(text: bytes, end: int) -> bytes:
    """Return the word before an offset; empty if there is none."""
    words = text[max(end - _LOOK_BACK, 0) : end].split()
    return _NO_WORD.split(words[-1])[-1] if words else b""
