"""The behavior of each nondeterministic op on CUDA, as data.

The name of an op comes in; its entry goes out: overloads, cause, replacement, and what torch does
under its flag. ``catalog.py`` reads the data in ``ops.txt``.
"""
