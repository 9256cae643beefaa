"""The products and sums of portable bits in Triton, with the bits of C.

Tensors of ``kernels.py`` in the folder above come in. No GPU has run them: tests execute their PTX.
Read ``kernels.py`` first.
"""
