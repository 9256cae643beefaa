"""Determinism without a change to the program, by the variable ``LIGHTNING_D9M``.

Entry points that torch and Lightning call come in; an open session, and a callback for each
Trainer, go out. Read ``entry_points.py`` first. This file imports nothing: every program
that imports torch runs it.
"""
