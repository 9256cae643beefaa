"""Measure how nondeterministic the ops of torch are on this machine, and whether a device works.

A device comes in; figures as JSON and a page in Markdown go out. Read ``ops/report.py`` first.
"""
