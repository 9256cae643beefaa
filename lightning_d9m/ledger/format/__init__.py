"""The files of a ledger, byte by byte: records as lines, digests of probes as frames.

In come records and digests; out go ``rank-N.jsonl`` and ``rank-N.frames``, and back. Read
``records.py`` first, then ``writer.py`` and ``reader.py``.
"""
