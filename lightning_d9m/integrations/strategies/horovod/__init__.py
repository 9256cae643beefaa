"""Training over Horovod: the strategy, its collectives, and Horovod's build.

A model in the processes of ``horovodrun`` comes in; gradients that are summed as those of logical
ranks go out. Importing this package imports no module of it: ``build`` needs neither torch nor
Lightning. Read ``strategy.py`` first, then ``environment.py``.
"""
