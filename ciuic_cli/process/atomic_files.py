"""File operations that leave a file or folder either complete or absent, and checks before a write."""

from __future__ import annotations

import ctypes
import glob
import os
import shutil
import stat
from pathlib import Path

from ciuic_cli.errors import EnvironmentFault
from ciuic_cli.process.file_faults import environment_fault

NOREPLACE, EXCHANGE = 1, 2
"""Flags of Linux' renameat2: fail if the target exists; swap the two paths."""
_AT_FDCWD = -100
"""Value of Linux for "relative to the working directory"."""


def sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to `path`. Afterwards the file is complete and synced, or unchanged.

    Raises EnvironmentFault if the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise environment_fault(error, path) from error
        raise


def is_writable(folder: Path) -> bool:
    """Whether files can be created in the folder. A mode without any write bit counts as read-only even for root."""
    return os.access(folder, os.W_OK | os.X_OK) and bool(folder.stat().st_mode & 0o222)


def may_rename(path: Path) -> bool:
    """Whether this user may rename `path`: in a sticky folder only root and the owners of `path` and the folder may."""
    parent = path.parent.stat()
    return not parent.st_mode & stat.S_ISVTX or os.geteuid() in (0, parent.st_uid, path.stat().st_uid)


def remove_path(path: Path) -> None:
    """Remove a file, a symbolic link (not its target), or a folder with its contents. An absent path is no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def require_space(destination: Path, nbytes: int) -> None:
    """Raise EnvironmentFault if the disk of `destination` has less than `nbytes` free.

    The temporary files of an unfinished run beside `destination` count as free: they need not be written again.
    """
    parent = next(path for path in destination.parents if path.exists())
    already_written = sum(
        path.stat().st_size
        for path in destination.parent.glob(f".{glob.escape(destination.name)}.*/**/*")
        if path.is_file()
    )
    free = shutil.disk_usage(parent).free
    if free + already_written < nbytes:
        raise EnvironmentFault(
            f"the disk is full: about {nbytes:,} bytes are needed, {free:,} are free",
            file=parent,
            remedy="free disk space, or choose an output folder on another disk",
        )


def rename_with_flag(first: Path, second: Path, flag: int) -> bool:
    """Rename with Linux' renameat2 and `flag` (NOREPLACE or EXCHANGE). False if the call is absent or fails."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    return bool(renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), flag) == 0)
