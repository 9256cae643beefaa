"""Check whether inference is repeatable and independent of the batch.

A function that returns a model and samples comes in; the modules and ops whose output varies go
out, with the modes of evaluation that prevent it. Read ``report.py`` first, then ``checks.py``.
"""
