"""State that a checkpoint needs so that a resumed run is bit-exact.

A Trainer that saves or loads a checkpoint comes in; what Lightning leaves out goes into it and
back, or the reasons why a resume is inexact. Read ``resumable_fit.py`` first, then
``run_state.py``.
"""
