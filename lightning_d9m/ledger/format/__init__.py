"""The files of a ledger, byte by byte: records as lines, digests of probes as frames."""
