"""Files that let a stranger check a result: proofs of trainings, and verdicts on them.

Read ``training.py`` first.
"""
