"""The ``d9m`` command line: one module for each command."""
