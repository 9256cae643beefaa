"""The ranks of a Trainer, and what they send each other.

A Trainer comes in; its `Ranks` go out, which gather bytes and raise an error on all. Read
``trainer_ranks.py`` first.
"""
