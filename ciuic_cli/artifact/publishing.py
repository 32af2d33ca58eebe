"""Renames a finished folder to its final name in one step: a killed run leaves either the old folder or the new one."""

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
    """Where the folder is written before it is renamed to `destination`."""
    return destination.with_name(f".{destination.name}.partial")


def _aside_of(destination: Path) -> Path:
    """Where a replaced folder is kept until the new one has its name, if the system cannot exchange folders."""
    return destination.with_name(f".{destination.name}.replaced")


def recover(destination: Path) -> list[Path]:
    """Clean up after a killed run: put a set-aside old folder back, and remove an unfinished new one.

    Returns the paths that cannot be removed. Raises EnvironmentFault if the old folder cannot be put back.
    """
    partial, aside = partial_of(destination), _aside_of(destination)
    try:
        if aside.exists() and not destination.exists():
            aside.rename(destination)
    except OSError as error:
        raise environment_fault(error, destination) from error
    return [path for path in (partial, aside) if not _removed(path)]


def _removed(path: Path) -> bool:
    """Remove whatever is at `path`; False if the system refuses."""
    try:
        remove_path(path)
    except OSError:
        return False
    return True


def publish(folder: Path, destination: Path, *, replace: bool) -> Path | None:
    """Sync the finished `folder` and rename it to `destination`.

    replace: exchange it with an existing folder there in one step, and remove the old one. Returns the path of an old
    folder that the system refuses to remove, else None. Raises EnvironmentFault if anything else is at `destination`,
    and does not touch it.
    """
    for path in folder.iterdir():
        sync_file(path)
    sync_folder(folder)
    replaced = None
    try:
        if not (replace and destination.is_dir() and not destination.is_symlink()):
            _rename_to_free(folder, destination)
        elif rename_with_flag(folder, destination, EXCHANGE):
            replaced = folder
        else:
            replaced = _replace_in_two_steps(folder, destination)
    except OSError as error:
        raise environment_fault(error, destination) from error
    sync_folder(destination.parent)
    return None if replaced is None or _removed(replaced) else replaced


def _rename_to_free(folder: Path, destination: Path) -> None:
    """Rename, but never onto anything that exists. Without renameat2 there is a short race between check and rename."""
    if rename_with_flag(folder, destination, NOREPLACE):
        return
    if os.path.lexists(destination):
        raise EnvironmentFault(
            "the output appeared while the run was working",
            file=destination,
            remedy="move it away and run the same command again: it continues where it stopped",
        )
    folder.rename(destination)


def _replace_in_two_steps(folder: Path, destination: Path) -> Path:
    """Rename the old folder aside and the new one to `destination`, for systems that cannot exchange two folders.

    If the second rename fails, the old folder is put back. Returns where the old folder is.
    """
    aside = _aside_of(destination)
    destination.rename(aside)
    try:
        folder.rename(destination)
    except OSError:
        aside.rename(destination)
        raise
    return aside
