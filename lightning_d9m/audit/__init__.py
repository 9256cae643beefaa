"""Measure how nondeterministic ops, trainings and inference are on this machine."""
