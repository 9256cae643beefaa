"""A file to which whole pieces are appended, even by a process that is interrupted."""

import os
from pathlib import Path
from typing import Generic, TypeVar

State = TypeVar("State")


class AppendedFile(Generic[State]):
    """A new file to which whole pieces are appended, each in one system call.

    Args:
        path: The file, which must not exist.
        state: What follows from the pieces in the file, such as the hash that chains them.

    Attributes:
        size: Bytes of all pieces.
        state: The state after the last of them.

    Raises:
        OSError: When the file exists or cannot be made.
    """

    def __init__(self, path: Path, state: State) -> None:
        self.path = path
        self.size = 0
        self.state = state
        self._begun = (0, state)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o666)

    @property
    def is_interrupted(self) -> bool:
        """True if something, such as Ctrl-C, interrupted the last append."""
        return self._begun[0] != self.size

    def resolve(self) -> None:
        """Find out whether an interrupted append was completed; take back a part of a piece.

        Raises:
            OSError: When the file was deleted or changed by another program.
        """
        status = os.fstat(self._file)
        if status.st_nlink == 0:
            raise OSError("the file was deleted while the run wrote it")
        if status.st_size == self._begun[0]:
            self.size, self.state = self._begun
        elif self.size < status.st_size < self._begun[0]:
            os.ftruncate(self._file, self.size)
        elif status.st_size != self.size:
            raise OSError("another program has changed the file")

    def append(self, piece: bytes, state: State) -> None:
        """Append all of a piece, or nothing of it.

        Raises:
            OSError: When it cannot be written.
        """
        self._begun = (self.size + len(piece), state)
        try:
            written = os.write(self._file, piece)
            while written < len(piece):
                # After a short write on a full disk, the next write raises the error.
                written += os.write(self._file, piece[written:])
        except OSError:
            os.ftruncate(self._file, self.size)
            self._begun = (self.size, self.state)
            raise
        self.size, self.state = self._begun

    def close(self) -> None:
        """Write the file to the disk and close it.

        Raises:
            OSError: When the disk reports that it could not keep the data.
        """
        try:
            os.fsync(self._file)
        finally:
            os.close(self._file)
