"""The ledger of a Trainer's run."""
