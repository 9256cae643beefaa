"""The user's command, run in subprocesses that leave ledgers.

In come a command, variables and a folder; out go the ledgers of its fits, paired across runs, and
no process that still runs. Read ``runs.py`` first.
"""
