"""Record a run's ledger and compare it with a reference and across ranks."""
