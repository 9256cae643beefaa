"""Check a ledger and list its probes, without lightning_d9m, as a reader in another language would.

docs/ledger.md describes the file of a rank. Run it on a ledger of yours:

    python examples/read_ledger.py d9m/fit-000
"""

import argparse
import json
from base64 import b64decode
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any


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


def list_batches(
    records: Iterable[dict[str, Any]],
) -> Iterator[tuple[int, int, int, list[tuple[list[Any], bytes]]]]:
    """Yield epoch, step and batch of each part of a batch, with the digest at each place."""
    layouts = {}
    for record in records:
        if record["kind"] == "layout":
            layouts[record["id"]] = record["places"]
        if record["kind"] == "probes":
            places, digests = layouts[record["layout"]], b64decode(record["digests"])
            found = [digests[at : at + 16] for at in range(0, len(digests), 16)]
            where = record["epoch"], record["step"], record["batch"]
            yield *where, list(zip(places, found, strict=True))


def main() -> None:
    """Print what is wrong with each rank's file, and the number of its probed batches."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ledger", type=Path, help="a folder fit-NNN")
    for path in sorted(parser.parse_args().ledger.glob("rank-*.jsonl")):
        records = [json.loads(line) for line in path.open("rb")]
        count = sum(1 for _ in list_batches(records))
        print(f"{path.name}: {verify(path) or 'whole'}, {len(records)} records, {count} batches")


if __name__ == "__main__":
    main()
