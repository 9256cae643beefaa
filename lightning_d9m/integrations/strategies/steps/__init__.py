"""Logical ranks in a Trainer: strategies whose bits do not depend on the number of processes.

A Trainer's batches and steps come in; the effects of all micro-batches go out, merged by rules that
do not depend on the number of processes. Read ``strategy.py`` first, then ``steps.py``.
"""
