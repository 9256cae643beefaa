"""Deterministic replacements of operations that torch leaves nondeterministic, one a file."""
