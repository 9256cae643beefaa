"""Prove that a run was deterministic: digests, ledger, stack, drift, comparison."""
