"""State that a checkpoint needs so that a resumed run is bit-exact, as a list of parts.

A Trainer that saves or loads a checkpoint comes in; what Lightning leaves out goes into it and
back, or the reasons why a resume is inexact. Read ``part.py`` first, then ``resumable_fit.py``.
"""
