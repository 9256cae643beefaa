"""Trainings of earlier commits: which commit changed the bits.

A git repository and the user's command come in; what goes out is the first commit whose training
differs from that of a good one, and how it differs. Read ``bisection.py`` first.
"""
