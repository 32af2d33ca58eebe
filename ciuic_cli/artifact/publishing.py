"""A finished folder takes its name in one step; a killed run leaves either the old folder or the new one."""

from __future__ import annotations

import os
from pathlib import Path

from ciuic_cli.errors import EnvironmentFault
from ciuic_cli.process.atomic_files import (
    EXCHANGE,
    NOREPLACE,
    remove_path,
    rename_with_flag,
    sync_file,
    sync_folder,
)
from ciuic_cli.process.file_faults import environment_fault


def partial_of(destination: Path) -> Path:
    """The name under which the folder is written before it gets its own."""
    return destination.with_name(f".{destination.name}.partial")


def _aside_of(destination: Path) -> Path:
    return destination.with_name(f".{destination.name}.replaced")


def recover(destination: Path) -> list[Path]:
    """Put right what a killed run left: an old folder that was put aside comes back, half a folder goes.

    Returns what cannot be removed.
    """
    partial, aside = partial_of(destination), _aside_of(destination)
    try:
        if aside.exists() and not destination.exists():
            aside.rename(destination)
    except OSError as error:
        raise environment_fault(error, destination) from error
    return [path for path in (partial, aside) if not _removed(path)]


def _removed(path: Path) -> bool:
    """Remove what is at `path`; False where the system refuses."""
    try:
        remove_path(path)
    except OSError:
        return False
    return True


def publish(folder: Path, destination: Path, *, replace: bool) -> Path | None:
    """Give the finished `folder` its name; with `replace`, a folder that has it is exchanged in one step.

    The old one is then removed; returns what is left of it where the system refuses that. Raises EnvironmentFault if
    anything else is there: it is not touched.
    """
    for path in folder.iterdir():
        sync_file(path)
    sync_folder(folder)
    old = None
    try:
        if not (replace and destination.is_dir() and not destination.is_symlink()):
            _rename_to_free(folder, destination)
        elif rename_with_flag(folder, destination, EXCHANGE):
            old = folder
        else:
            old = _replace_in_two_steps(folder, destination)
    except OSError as error:
        raise environment_fault(error, destination) from error
    sync_folder(destination.parent)
    return None if old is None or _removed(old) else old


def _rename_to_free(folder: Path, destination: Path) -> None:
    """Rename, but never onto anything. Without renameat2 a moment passes between the look and the step."""
    if rename_with_flag(folder, destination, NOREPLACE):
        return
    if os.path.lexists(destination):
        raise EnvironmentFault(
            "the output appeared while the run was working",
            file=destination,
            remedy="move it away and run the same command again: it goes on where it stopped",
        )
    folder.rename(destination)


def _replace_in_two_steps(folder: Path, destination: Path) -> Path:
    """Where the system cannot exchange: the old one is put aside, and back if the new one cannot take its place.

    Returns where the old one is.
    """
    aside = _aside_of(destination)
    destination.rename(aside)
    try:
        folder.rename(destination)
    except OSError:
        aside.rename(destination)
        raise
    return aside
