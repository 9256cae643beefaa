"""Make a run deterministic: settings, variables, seeding, algorithms, loaders, session.

Settings come in; a session goes out, in which flags, variables, generators and loaders are
deterministic, and at whose end everything is restored. Read ``session.py`` first, then
``seeding.py``.
"""
