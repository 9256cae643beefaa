"""Seeded and resumable loaders, samplers and datasets.

A loader of the program and a seed come in; the same loader goes out, whose order and draws depend
only on seed and epoch, and which can continue within an epoch. Read ``loaders.py`` first, then
``resumable_sampler.py``.
"""
