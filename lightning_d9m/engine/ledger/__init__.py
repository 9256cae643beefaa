"""The ledger: what a run leaves behind, as typed records in files, and the reader of these files.

In comes a record, or the digests of a batch's probes; out go a line or a block of a file whose
chain of hashes shows edits, and on reading the same records as a stream. Read ``format/records.py``
first: it is the schema.
"""
