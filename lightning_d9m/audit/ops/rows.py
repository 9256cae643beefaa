"""The file of an audit's rows, to which each row is appended when it is measured."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_d9m.errors import CommandError, SettingError

ROW_SCHEMA = 2


class RowFile:
    """A file of JSON lines: first the settings, then one row for each case.

    An incomplete row at the end, left by an interruption, is removed and measured again.

    Args:
        path: The file; created if it does not exist.
        settings: The settings of the rows. An existing file must have the same.

    Raises:
        SettingError: The file has different settings.
        CommandError: The file cannot be read or written, or is not a file of rows.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self._settings = dict(settings)
        self.rows: list[dict[str, Any]] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                self._load(settings)
            self._file = path.open("ab")
        except OSError as error:
            raise CommandError(
                f"The rows of the audit cannot be written to {path}: {error.strerror or error}. "
                "Give a different folder with --output."
            ) from error

    def add(self, row: dict[str, Any]) -> None:
        """Append a row and flush the file."""
        if not self._file.tell():
            # Not earlier: settings that measure nothing must not occupy the folder.
            self._write({"schema": ROW_SCHEMA, "settings": self._settings})
        self.rows.append(row)
        self._write(row)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()

    def _load(self, settings: Mapping[str, Any]) -> None:
        text = self.path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        kept = settings
        try:
            first, *rows = [json.loads(line) for line in whole.splitlines()] or [None]
            if first is not None:
                kept = {ROW_SCHEMA: first["settings"]}[first["schema"]]
                self.rows = [row for row in rows if row["key"]]
        except (ValueError, KeyError, TypeError) as error:
            raise CommandError(
                f"{self.path} is not a file of rows that this version of the command wrote. Give a "
                "different folder with --output, or remove the file."
            ) from error
        if len(whole) < len(text):
            os.truncate(self.path, len(whole))
        differing = [name for name in {**kept, **settings} if kept.get(name) != settings.get(name)]
        if differing:
            lines = "".join(
                f"\n  {name}: expected: {kept.get(name)!r}\n  {name}: actual:   "
                f"{settings.get(name)!r}"
                for name in sorted(differing)
            )
            raise SettingError(
                f"{self.path} contains rows that were measured with different settings:{lines}\n"
                "Give the same settings to continue that audit, or a different folder with "
                "--output."
            )
