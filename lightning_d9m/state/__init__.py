"""The state of a training: everything that code of the program can reach and change.

Objects that a program owns come in; what goes out is a `State`, which can be restored, compared,
and encoded. Read ``parts.py`` first, which says what an object holds, and then ``state.py``.
"""
