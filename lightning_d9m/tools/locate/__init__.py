"""The search for the cause of a difference between runs of one command.

In comes a command; out go the first place at which its runs differ, narrowed down to a step, a
module and an operation, and the values and source lines there. Read ``search.py`` first.
"""
