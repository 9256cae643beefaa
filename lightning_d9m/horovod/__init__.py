"""Training over Horovod: the strategy, its gradient buckets and collectives, and Horovod's build.

A model in the processes of ``horovodrun`` comes in; gradients that are summed in fixed buckets go
out. Importing this package imports no module of it: ``build`` needs neither torch nor Lightning.
Read ``base_strategy.py`` first, then ``gradient_buckets.py``.
"""
