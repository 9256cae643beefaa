"""Static checks of Python source for causes of nondeterminism.

Files come in: their paths, or the program of a command. Findings go out, each with its rule, place,
reason and fix; nothing is imported or run, and torch is not loaded. Read ``scanner.py`` first, then
``tree.py``, which follows names and values; each module of ``checks`` has one function per rule.
"""
