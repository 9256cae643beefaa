"""The output folder of a command."""

from pathlib import Path

from lightning_d9m.errors import LedgerError
from lightning_d9m.file_errors import explain_file_error


def make_output(chosen: Path | None, parent: str = "d9m-runs", prefix: str = "") -> Path:
    """Create a new folder; an existing one is an error.

    Without a chosen one it is the next free number in ``parent``, after ``prefix``.

    Raises:
        LedgerError: If it exists already or cannot be created.
    """
    candidates = (
        (Path(parent, f"{prefix}{number:03d}") for number in range(1000))
        if chosen is None
        else [chosen]
    )
    for folder in candidates:
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except FileNotFoundError as error:  # /proc, or a broken link: its parents exist
            raise LedgerError(
                f"The folder {folder} cannot be made: {error.strerror}. Give another with --output."
            ) from error
        except (OSError, ValueError) as error:
            raise LedgerError(
                f"The folder {folder} cannot be made: {explain_file_error(error)}"
            ) from error
        return folder.resolve()
    if chosen is None:
        raise LedgerError(
            f"{parent} holds 1000 repetitions already. Remove old ones, or give a new folder with "
            "--output."
        )
    raise LedgerError(
        f"The folder {chosen} exists already, and nothing is overwritten. Give a new one with "
        "--output, or remove it."
    )
