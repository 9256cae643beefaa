"""Compute digests of tensors, values, models and checkpoints."""
