"""The rules of ``d9m scan``.

The tree of a file comes in; places that break a rule go out. Read ``settings.py`` first, a set
of plain rules, then ``ops.py``, which reads the catalog.
"""
