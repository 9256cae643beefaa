"""The file of an audit's rows: appended to as they are measured, and taken up again later."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_d9m.errors import CommandError, SettingError

SCHEMA = 1


class RowFile:
    """A file of JSON lines: first the settings, then one row for each case.

    A row that an interruption tore is dropped, and measured again.

    Args:
        path: The file; made when it is not there.
        settings: What the rows depend on. A file that is there must have been made with the same.

    Raises:
        SettingError: When the file was made with other settings.
        CommandError: When it cannot be read or written, or is no file of rows.
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
                f"The rows of the audit cannot be kept in {path}: {error.strerror or error}. Give "
                "another folder with --output."
            ) from error

    def add(self, row: dict[str, Any]) -> None:
        """Append a row; it is in the file when this returns."""
        if not self._file.tell():
            # Not before: settings with which nothing could be measured must not claim the folder.
            self._write({"schema": SCHEMA, "settings": self._settings})
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
        try:
            records = [json.loads(line) for line in whole.splitlines()]
            if records:
                kept = records[0]["settings"]
                self.rows = [record for record in records[1:] if record["key"]]
        except (ValueError, KeyError, TypeError) as error:
            raise CommandError(
                f"{self.path} is not a file of rows that this command wrote. Give another folder "
                "with --output, or remove it."
            ) from error
        if len(whole) < len(text):
            os.truncate(self.path, len(whole))
        if not records:
            return
        differing = [name for name in {**kept, **settings} if kept.get(name) != settings.get(name)]
        if differing:
            lines = "".join(
                f"\n  {name}: expected: {kept.get(name)!r}\n  {name}: actual:   "
                f"{settings.get(name)!r}"
                for name in sorted(differing)
            )
            raise SettingError(
                f"{self.path} holds rows that were measured with other settings, which cannot be "
                f"mixed with new ones:{lines}\nGive the same settings to go on with that audit, or "
                "another folder with --output."
            )
