"""The only code that knows Lightning, Horovod and other training loops.

Hooks of a Trainer come in, calls of the engine go out. Read ``lightning/callback.py``.
"""
