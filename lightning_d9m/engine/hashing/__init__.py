"""Compute digests of tensors, values, models and checkpoints.

Tensors on any device, nested values, or the shards that ranks hold come in; digests of 32
hexadecimal digits go out. Read ``digest.py`` first, then ``training_state.py``, which digests all
state of a training.
"""
