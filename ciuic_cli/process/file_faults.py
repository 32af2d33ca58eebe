"""Errors of the operating system while a file is read, as errors that name the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ciuic_cli.errors import EnvironmentFault
from ciuic_cli.process.memory import exhaustion


@contextmanager
def reading(file: Path, tensor: str | None = None) -> Iterator[None]:
    """Turn an OSError in the block into an EnvironmentFault that names the file: the disk or the network may recover.

    Exhausted memory is not the file's fault: that OSError passes unchanged, for `memory.exhaustion`.
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
