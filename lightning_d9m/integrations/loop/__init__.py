"""The recorder for any training loop: plain torch, Fabric, Accelerate, Transformers.

A model, its optimizers and calls at each step and epoch come in; a ledger goes out, and loaders
that are seeded and resumable. Read ``recorder.py`` first, then ``optimizer_steps.py``, which needs
no calls.
"""
