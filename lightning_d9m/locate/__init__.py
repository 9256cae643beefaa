"""Narrow a divergence down to a step, module and op."""
