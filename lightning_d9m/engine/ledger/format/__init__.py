"""The files of a ledger, byte by byte: a record is a line with a check.

In come records and digests; out goes ``rank-N.jsonl``, and back. Read ``records.py`` first, then
``writer.py`` and ``reader.py``.
"""
