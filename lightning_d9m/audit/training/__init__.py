"""Measure the spread of several trainings.

The ledgers and weights of runs with and without determinism come in; the distances between the runs
go out, by epoch and by layer. Read ``report.py`` first, then ``runs.py``.
"""
