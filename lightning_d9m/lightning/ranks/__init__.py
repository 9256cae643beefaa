"""The ranks of a Trainer, and what they send each other."""
