"""Building blocks that the kernels share."""
