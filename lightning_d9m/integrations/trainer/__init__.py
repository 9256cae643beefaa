"""Lightning's Trainer: its packages, its public attributes, and the private ones.

A Trainer comes in, values of it go out. Read ``lightning_private.py``.
"""
