"""Training over Horovod: the strategy, its buckets, its wire, and the build of Horovod itself.

Importing this package loads nothing: ``build`` and ``settings`` are read without Lightning.
"""
