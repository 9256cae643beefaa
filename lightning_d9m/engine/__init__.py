"""The engine makes a training deterministic and records it: it never imports a tool.

Settings and generators come in, a ledger goes out. Read ``control/session.py``, which sets
what a run needs, and ``recording/run.py``, which writes what it did.
"""
