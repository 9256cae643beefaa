"""The kernels of portable bits in Triton, for CUDA.

Each result takes the sequence of operations of the C kernels, so it has their bits. The arguments
of a function of ``kernels.py`` in the folder above come in; it compares an example first. No GPU
has run them: tests execute their PTX.
"""
