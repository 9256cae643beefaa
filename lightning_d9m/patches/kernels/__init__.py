"""Deterministic replacements, one file for each op family."""
