"""The state of a training: everything that code of the program can reach and change.

Objects that a program owns come in; what goes out is a `Watch`, which finds what has changed, and
`Changes` as plain data. Read ``parts.py`` first, which says what an object holds, then
``state.py``.
"""
