"""Triton's interpreter, without work that it repeats."""

import importlib
from types import SimpleNamespace


def spare_repetitions():
    """Let the interpreter replace Triton's functions and make its table of types once.

    It does so in every call of a function and for every value, which takes longer than a small
    kernel. The module of the function that is called decides what is replaced. This process can no
    longer compile kernels.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    replace, scopes = interpreter._patch_lang, {}
    find_type, types = interpreter._get_np_dtype, {}

    def replace_once(function):
        if function.__module__ not in scopes:
            scopes[function.__module__] = replace(function)
        return SimpleNamespace(restore=lambda: None)

    def find_type_once(dtype):
        name = dtype.scalar.name
        if name not in types:
            types[name] = find_type(dtype)
        return types[name]

    interpreter._patch_lang, interpreter._get_np_dtype = replace_once, find_type_once
