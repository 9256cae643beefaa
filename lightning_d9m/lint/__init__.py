"""Static checks of Python source for causes of nondeterminism.

This package does not import torch. Its knowledge of torch's ops is the catalog in ``patches``.
"""
