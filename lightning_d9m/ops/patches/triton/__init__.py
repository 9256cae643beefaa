"""Replacements as Triton kernels, for CUDA.

The arguments of a primitive come in; the bits of its version in torch ops go out. Read
``launch.py`` first, which falls back to torch ops.
"""
