"""Sums over logical ranks whose bits do not depend on the number of processes."""
