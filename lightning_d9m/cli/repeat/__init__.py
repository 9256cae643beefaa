"""``d9m repeat`` and its variants.

The words of the command come in; a table of runs and the first divergence go out. Read
``command.py`` first, which hands ``--interrupt`` and ``--processes`` to the other two.
"""
