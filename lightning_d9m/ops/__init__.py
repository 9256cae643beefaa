"""Replacements of operations of torch: deterministic ones, and ones with the same bits everywhere.

Arguments of an operation come in, its results go out. Read ``patches/registration.py`` and
``portability/mode.py``.
"""
