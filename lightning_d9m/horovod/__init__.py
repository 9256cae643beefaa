"""Training over Horovod: the strategy, its gradient buckets and collectives, and Horovod's build.

Importing this package imports no module of it: ``build`` needs neither torch nor Lightning.
"""
