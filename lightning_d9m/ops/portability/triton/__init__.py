"""The kernels of portable bits as one text for Triton and for torch ops, with the bits of C.

Tensors of ``kernels.py`` in the folder above come in. No GPU has run them: tests execute their PTX.
Read ``kernels.py`` first; ``formulas.py`` writes most of the others.
"""
