"""Collectives between Horovod's ranks."""
