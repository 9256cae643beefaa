"""Deterministic replacements of ops that torch leaves nondeterministic."""
