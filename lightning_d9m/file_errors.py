"""Explanations of file errors."""

import errno
import os

_ADVICE = {
    errno.ENOENT: "Check the name; a ledger is a folder fit-NNN under the Trainer's log directory.",
    errno.ENOTDIR: "A part of the path is a file, not a folder; choose another path.",
    errno.ELOOP: "Its symbolic links lead in a circle; remove them or name the real folder.",
    errno.EACCES: "Give this user the permission, or choose another folder.",
    errno.EPERM: "Give this user the permission, or choose another folder.",
    errno.EROFS: "Choose a folder on a file system that can be written.",
    errno.ENOSPC: "Free some space, or put the ledger on another disk.",
    errno.EDQUOT: "Free some space, or put the ledger on another disk.",
    errno.EFBIG: "Raise the limit on the size of a file (ulimit -f), or record fewer moments.",
    errno.EEXIST: "Nothing was overwritten; choose a new folder.",
    errno.ENAMETOOLONG: "Choose a shorter path.",
}


def explain_file_error(error: OSError | ValueError) -> str:
    """Return the cause of a failed file operation and what to do about it."""
    number = getattr(error, "errno", None)
    if number is None:
        return f"{error}."
    return f"{os.strerror(number)}. {_ADVICE.get(number, 'Check the path and the disk.')}"
