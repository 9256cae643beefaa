"""The hash that chains the lines of a ledger."""

from hashlib import blake2b

CHAIN_START = b"0" * 16


def chain_record(body: bytes, previous: bytes) -> tuple[bytes, bytes]:
    """Return (line, chain hash) of a record's JSON, given the chain hash before it."""
    head = body[:-1]
    chain_hash = blake2b(previous + head, digest_size=8).hexdigest().encode()
    return b'%b,"check":"%b"}\n' % (head, chain_hash), chain_hash
