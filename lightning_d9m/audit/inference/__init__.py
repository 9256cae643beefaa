"""Check whether inference is repeatable and independent of the batch."""
