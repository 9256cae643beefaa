"""Probes of the batches of a training: hooks, traces and evidence.

Values at places of a training step come in; digests in the order of execution go out to a ledger,
and the values themselves to files if they are asked for. Read ``batch_probes.py`` first, then
``trace.py``.
"""
