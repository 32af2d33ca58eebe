"""What the system refuses while a file is read: said with the file's name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ciuic_cli.errors import EnvironmentFault
from ciuic_cli.process.memory import exhaustion


@contextmanager
def reading(file: Path, tensor: str | None = None) -> Iterator[None]:
    """Raise EnvironmentFault for the system's errors in the block: the disk's or the network's, and they may pass.

    Memory that is used up is not the file's fault, and is left to whoever catches it by `exhaustion`.
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
            remedy="check its permissions and the disk, and run the same command again: compress goes on where it "
            "stopped",
        ) from error
