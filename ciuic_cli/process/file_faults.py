"""File errors of the operating system as `EnvironmentFault`s that name the file and a remedy.

`reading` wraps code that reads a file. `environment_fault` converts the error of a failed write.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ciuic_cli.errors import EnvironmentFault
from ciuic_cli.process.memory import exhaustion

if TYPE_CHECKING:
    from safetensors import SafetensorError


@contextmanager
def reading(file: Path, tensor: str | None = None) -> Iterator[None]:
    """Convert an OSError in the block to an EnvironmentFault that names `file`: the disk or the network may recover.

    Exhausted memory is not an error of the file. That OSError passes unchanged, for `memory.exhaustion`.
    """
    try:
        yield
    except OSError as error:
        if exhaustion(error) is not None:
            raise
        raise EnvironmentFault(
            f"cannot read the file: {error.strerror or error}",
            file=file,
            tensor=tensor,
            remedy="check its permissions and the disk, and run the same command again: compress continues where it "
            "stopped",
        ) from error


def environment_fault(error: OSError | SafetensorError, path: Path) -> EnvironmentFault:
    """The EnvironmentFault for a failed write to `path`: full disk, exceeded quota, missing permission, ...

    Exhausted memory or file descriptors are not a failed write.
    """
    fault = exhaustion(error)
    if fault is not None:
        return fault
    remedies = {
        errno.ENOSPC: "free disk space and run the same command again: it continues where it stopped",
        errno.EDQUOT: "your disk quota is used up; free some and run the same command again",
        errno.EFBIG: "raise the limit on the size of files (ulimit -f) and run the same command again",
        errno.EACCES: "check the permissions of the folder",
        errno.EPERM: "check the permissions of the folder",
        errno.EROFS: "the file system is read-only; choose another output folder",
    }
    code = _error_number(error)
    reason = os.strerror(code) if code else str(error)
    return EnvironmentFault(
        f"cannot write: {reason}",
        file=path,
        remedy=remedies.get(code, "check the disk and run the same command again"),
    )


def _error_number(error: OSError | SafetensorError) -> int:
    """The error number of the system; 0 if unknown. safetensors gives it only in its text: "(os error 28)"."""
    if isinstance(error, OSError):
        return error.errno or 0
    match = re.search(r"os error (\d+)", str(error))
    return int(match[1]) if match else 0
