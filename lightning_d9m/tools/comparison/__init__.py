"""The comparison of two ledgers: a verdict that was checked against all records.

In come two ledgers, or one with several ranks; out go the counts of what agrees and differs, the
first divergence of each rank, and its cause with the evidence. Read ``ledgers.py`` first.
"""
