"""Measure how nondeterministic ops and trainings are on this machine.

A device or a command that trains comes in; figures as JSON, a page in Markdown and plots go out.
``ops`` measures the one, ``training`` the other. Read ``training.py`` first, which is shorter.
"""
