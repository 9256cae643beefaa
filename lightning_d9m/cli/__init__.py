"""The ``d9m`` command: one file for each command."""
