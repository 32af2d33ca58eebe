"""Files that are either complete or absent, and what the file system's refusals mean to a user."""

from __future__ import annotations

import ctypes
import errno
import glob
import os
import re
import shutil
import stat
from pathlib import Path

from safetensors import SafetensorError

from ciuic_cli.errors import EnvironmentFault


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
    """A file with `data`, complete and synced, or as it was before."""
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


def environment_fault(error: OSError | SafetensorError, path: Path) -> EnvironmentFault:
    """A failed write in the words of the user: full disk, no permission, and what to do about it."""
    remedies = {
        errno.ENOSPC: "free disk space and run the same command again: it goes on where it stopped",
        errno.EDQUOT: "your disk quota is used up; free some and run the same command again",
        errno.EFBIG: "raise the limit on the size of files (ulimit -f) and run the same command again",
        errno.EACCES: "check the permissions of the folder",
        errno.EPERM: "check the permissions of the folder",
        errno.EROFS: "the file system is read-only; choose another output folder",
    }
    code = _number(error)
    reason = os.strerror(code) if code else str(error)
    return EnvironmentFault(
        f"cannot write: {reason}",
        file=path,
        remedy=remedies.get(code, "check the disk and run the same command again"),
    )


def _number(error: OSError | SafetensorError) -> int:
    """The system's error number; 0 if there is none. safetensors only has it in its text: "(os error 28)"."""
    if isinstance(error, OSError):
        return error.errno or 0
    found = re.search(r"os error (\d+)", str(error))
    return int(found[1]) if found else 0


def is_writable(folder: Path) -> bool:
    """Whether files may be made in the folder. A mode without any write bit counts for the superuser too."""
    return os.access(folder, os.W_OK | os.X_OK) and bool(folder.stat().st_mode & 0o222)


def may_rename(path: Path) -> bool:
    """Whether the sticky bit of its folder lets us rename `path`: then only its owner or the folder's may."""
    parent = path.parent.stat()
    return not parent.st_mode & stat.S_ISVTX or os.geteuid() in (0, parent.st_uid, path.stat().st_uid)


def clear_away(path: Path) -> None:
    """Remove a file, a folder with all that is in it, or a link but not what it leads to; or nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def require_space(destination: Path, nbytes: int) -> None:
    """Raise EnvironmentFault if the disk has not even `nbytes` free for what will be written beside `destination`.

    What an unfinished run has written there already counts as free: it need not be written again.
    """
    parent = next(path for path in destination.parents if path.exists())
    begun = sum(
        path.stat().st_size
        for path in destination.parent.glob(f".{glob.escape(destination.name)}.*/**/*")
        if path.is_file()
    )
    free = shutil.disk_usage(parent).free
    if free + begun < nbytes:
        raise EnvironmentFault(
            f"the disk is full: about {nbytes:,} bytes are needed, {free:,} are free",
            file=parent,
            remedy="free disk space, or choose an output folder on another disk",
        )


NOREPLACE, EXCHANGE = 1, 2
"""Flags of Linux' renameat2."""


def renamed(first: Path, second: Path, flag: int) -> bool:
    """Rename with renameat2; False where the system cannot or refuses."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    at_working_directory = -100
    return bool(
        rename(at_working_directory, os.fsencode(first), at_working_directory, os.fsencode(second), flag) == 0
    )
