"""Check a ledger and list its frames, without lightning_d9m, as a reader in another language would.

docs/ledger.md describes both files of a rank. Run it on a ledger of yours:

    python examples/read_ledger.py d9m/fit-000
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from struct import unpack_from

from xxhash import xxh3_64_intdigest


def verify(path: Path) -> str | None:
    """Return which line of ``rank-N.jsonl`` does not fit its check, or None."""
    check = b"0" * 16
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            head, _, rest = line.rpartition(b',"check":"')
            check = blake2b(check + head, digest_size=8).hexdigest().encode()
            if rest != check + b'"}\n':
                return f"line {number} was edited, or a line before it removed, added or moved"
    return None


def list_frames(
    data: bytes, check: int, places: Mapping[int, int]
) -> Iterator[tuple[int, int, int, int, bytes]]:
    """Yield epoch, step, batch, layout and digests of each frame in ``rank-N.frames``.

    Args:
        data: The bytes of the file.
        check: The check of the header in ``rank-N.jsonl``.
        places: The number of places of each layout, by its id.

    Raises:
        ValueError: If a block was changed.
    """
    epoch, step, batch = 0, -1, -1
    at = 8
    while at < len(data):
        layout, count, steps, batches = unpack_from("<HHBB", data, at)
        size = 16 * places[layout]
        end = at + 6 + (count * size or 24)
        check = xxh3_64_intdigest(data[at:end], check)
        if unpack_from("<Q", data, end) != (check,):
            raise ValueError(f"the block at byte {at} does not fit its check")
        if not count:
            epoch, step, batch = unpack_from("<qqq", data, at + 6)
        for start in range(at + 6, at + 6 + count * size, size):
            step, batch = step + steps, batch + batches
            yield epoch, step, batch, layout, data[start : start + size]
        at = end + 8


def main() -> None:
    """Print what is wrong with each rank's files, and the number of its frames."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ledger", type=Path, help="a folder fit-NNN")
    for path in sorted(parser.parse_args().ledger.glob("rank-*.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        places = {r["id"]: len(r["places"]) for r in records if r["kind"] == "layout"}
        frames, count = path.with_suffix(".frames"), 0
        if frames.exists():
            check = int(records[0]["check"], 16)
            count = sum(1 for _ in list_frames(frames.read_bytes(), check, places))
        print(f"{path.name}: {verify(path) or 'whole'}, {len(records)} records, {count} frames")


if __name__ == "__main__":
    main()
