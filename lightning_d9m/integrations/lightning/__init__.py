"""The integration with Lightning: callback, session, autoload, resume, probing, logical ranks.

A Trainer's hooks come in; a deterministic run, its ledger and its checkpoints go out. Read
``callback.py`` first, then ``trainer_session.py``. This file imports nothing: every program that
imports torch may run it.
"""
