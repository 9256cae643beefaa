"""Replacements as Triton kernels, for CUDA."""
