"""Commands that people call: they run, compare, search and report trainings.

Ledgers and commands of the user come in, verdicts go out. Read ``cli/main.py``.
"""
