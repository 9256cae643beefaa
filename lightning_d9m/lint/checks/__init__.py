"""The rules of ``d9m scan``.

The tree of a file comes in; places that break a rule go out. Read ``seeds.py`` first, a plain set
of rules, then ``ops.py``, which reads the catalog.
"""
