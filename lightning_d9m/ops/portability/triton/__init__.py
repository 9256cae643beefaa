"""The kernels of portable bits in Triton, for CUDA, with the sequences and bits of the C ones.

Tensors of ``kernels.py`` in the folder above come in; it compares an example first. No GPU has run
them: tests execute their PTX. Read ``formulas.py``, which writes most of them.
"""
