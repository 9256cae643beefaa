"""The ``d9m`` command line: one module for each command.

The words of a command come in; its result goes out as text or JSON, with exit status 0 (equal or
nothing found), 1 (different or found) or 2 (an error). Each module describes its arguments in
``ARGUMENTS``, works in ``run``, and lays out what it alone prints. Read ``main.py`` first: it
imports the chosen command alone.
"""
