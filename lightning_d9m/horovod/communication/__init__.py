"""Collectives between Horovod's ranks.

Tensors and plain values of each rank come in; sums and lists go out, equal on all ranks, or the
same error on all. Read ``communicator.py`` first, then ``groups.py``.
"""
