"""Deterministic replacements, one file for each op family.

The arguments of an op come in; its result goes out, from exact sums, taps or sorted elements. Read
``updates.py`` first.
"""
