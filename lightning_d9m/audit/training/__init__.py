"""Measure the spread of several trainings."""
