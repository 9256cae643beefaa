"""Ledgers: folders of files, their records and how they are found; `format` has the files."""
