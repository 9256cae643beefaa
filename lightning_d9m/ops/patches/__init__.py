"""Deterministic replacements of ops that torch leaves nondeterministic.

A call of such an op on CUDA comes in through torch's dispatcher; its result goes out with the same
bits in every run. Read ``catalog/ops.txt`` first, then ``registration.py``, ``exact_sums.py`` and
``kernels/separable.py``.
"""
