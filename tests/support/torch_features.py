"""Marks of tests that need what an older torch lacks; see benchmarks/libraries/stacks.py."""

import inspect

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_d9m.compatibility import describe_missing_patches, has_compiler_flag, has_mkldnn_flag


def _need(found, what):
    return pytest.mark.skipif(not found, reason=f"torch {torch.__version__} has no {what}")


needs_patches = _need(describe_missing_patches() is None, "dispatcher that can be patched")
needs_in_order = _need("in_order" in inspect.signature(DataLoader).parameters, "in_order")
needs_compiler_flag = _need(has_compiler_flag(), "deterministic flag of the compiler")
needs_all_flags = _need(has_compiler_flag() and has_mkldnn_flag(), "flags of all libraries")
