"""Compare two ledgers and name the first divergence."""
