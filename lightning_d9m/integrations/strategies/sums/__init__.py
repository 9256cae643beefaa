"""Gradients and state of logical ranks, with bits that do not depend on the number of processes.

The gradients of each micro-batch of a process come in; the sum over all logical ranks goes out,
added along one fixed tree. Read ``tree.py`` first, then ``gradients.py``; nothing here knows
Lightning.
"""
