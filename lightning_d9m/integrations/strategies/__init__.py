"""Strategies of a Trainer: Horovod's, and logical ranks on DDP.

Gradients of processes come in, sums in a fixed order go out. Read ``strategies.py`` first,
which has the names of all; ``steps/`` runs the steps of logical ranks, ``sums/`` adds what they
computed.
"""
