"""The ledger of a Trainer's run.

Hooks of a Trainer come in; records of its state, losses, metrics and evaluations go out. Read
``trainer_recorder.py`` first, then ``ledger_location.py``.
"""
