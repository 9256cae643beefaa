"""Record a run's ledger and its probes, and compare it with a reference and across ranks.

A model, its optimizers and the ranks come in; records go out to the ledger, and a ``DriftError`` on
all ranks if one differs. Read ``run.py`` first, then ``reference.py`` and ``rank_agreement.py``.
"""
