"""What each nondeterministic op does on CUDA, as data."""
