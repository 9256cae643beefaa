"""The behavior of each nondeterministic op on CUDA, as data."""
