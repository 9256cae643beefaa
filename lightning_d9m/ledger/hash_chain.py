"""The hash that chains the lines of a ledger."""

from hashlib import blake2b

CHAIN_START = b"0" * 16


def chain_record(body: bytes, previous: bytes) -> tuple[bytes, bytes]:
    """Return (the line that is written, its check) for a record's JSON and the check before it."""
    head = body[:-1]
    check = blake2b(previous + head, digest_size=8).hexdigest().encode()
    return b'%b,"check":"%b"}\n' % (head, check), check
