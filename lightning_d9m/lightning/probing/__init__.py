"""Probes of modules, gradients and ops in a Trainer's fit, and replay of training steps.

Hooks of a Trainer and of its modules come in; digests of values in the order of execution go out to
the ledger. Read ``recorder.py`` first, then ``module_hooks.py`` and ``dispatch_mode.py``.
"""
