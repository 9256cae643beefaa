"""Measure how nondeterministic ops, trainings and inference are on this machine.

A device, a command that trains, or a function that returns a model comes in; figures as JSON, a
page in Markdown and plots go out. Each of ``ops``, ``training`` and ``inference`` measures one of
the three. Read ``ops/report.py`` first: it names the figures.
"""
