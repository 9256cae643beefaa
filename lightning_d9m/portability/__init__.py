"""The same bits on every machine.

Every operation that torch dispatches comes in; its result goes out, computed from operations that
IEEE 754 defines. Read ``mode.py`` first, then ``registry.py`` with the table of rules, and
``sums.py``, which most rules need.
"""
