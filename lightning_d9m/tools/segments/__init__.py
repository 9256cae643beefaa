"""Parts of a run that are run again, to check them, to enter them, or to see more of them.

In come a run's ledger and the checkpoints that it names; out go runs of the user's own command that
begin at a checkpoint and end at a step, and how they compare. Read ``segment.py`` first.
"""
