"""Renames a finished folder to its final name in one step: a killed run leaves either the old folder or the new one.

The new folder is written inside a working folder beside the destination. Only an empty folder, or one that ciuic wrote,
is ever replaced.
"""

from __future__ import annotations

import os
from pathlib import Path

from ciuic_cli.artifact.schema import is_artifact
from ciuic_cli.artifact.writer import CHECKSUMS
from ciuic_cli.checkpoint.folder import read_config
from ciuic_cli.errors import CiuicError, EnvironmentFault, InputError
from ciuic_cli.process import work_folders
from ciuic_cli.process.atomic_files import (
    EXCHANGE,
    NOREPLACE,
    rename_with_flag,
    sync_file,
    sync_folder,
)
from ciuic_cli.process.file_faults import environment_fault


def partial_of(destination: Path) -> Path:
    """The working folder of an unfinished artifact."""
    return work_folders.work_folder(destination, work_folders.PARTIAL)


def _aside_of(destination: Path) -> Path:
    """Where a replaced folder is kept until the new one has its name, if the system cannot exchange folders."""
    return partial_of(destination) / "old"


def begin(destination: Path) -> Path:
    """Make the folder that will be renamed to `destination`, and return it. Removes an unfinished one.

    Raises InputError if something that ciuic did not make is in the way, and OSError.
    """
    partial = partial_of(destination)
    work_folders.remove(partial)
    work_folders.create(partial)
    folder = partial / "new"
    folder.mkdir()
    return folder


def recover(destination: Path) -> Path | None:
    """Clean up after a killed run: put a set-aside old folder back, and remove the working folder.

    Returns the working folder if it cannot be removed, else None. Raises EnvironmentFault if the old folder cannot be
    put back.
    """
    aside = _aside_of(destination)
    try:
        if work_folders.is_marked(partial_of(destination)) and aside.exists() and not destination.exists():
            aside.rename(destination)
    except OSError as error:
        raise environment_fault(error, destination) from error
    return discard(destination)


def discard(destination: Path) -> Path | None:
    """Remove the working folder with everything in it. Returns its path if the system refuses, else None."""
    partial = partial_of(destination)
    try:
        work_folders.remove(partial)
    except OSError:
        return partial
    return None


def may_replace(destination: Path, *, force: bool) -> bool:
    """Whether a new artifact may replace the folder `destination`.

    It may if the folder is empty. With `force` it may also replace a folder that ciuic wrote, which has its list of
    checksums or its config.json.
    """
    if destination.is_symlink() or not destination.is_dir():
        return False
    try:
        if not os.listdir(destination):
            return True
        return force and ((destination / CHECKSUMS).is_file() or is_artifact(read_config(destination)))
    except (CiuicError, OSError):  # without a config.json, or one that is damaged or cannot be read
        return False


def require_new(destination: Path, *inputs: Path) -> None:
    """Raise InputError if the output exists, or lies inside one of the folders that are read, or around it.

    destination: an absolute path. An empty folder counts as absent.
    """
    out = Path(os.path.realpath(destination))
    for folder in inputs:
        source = folder.resolve()
        if out == source or source in out.parents or out in source.parents:
            raise InputError(
                "the output lies inside the input, or the other way round",
                file=destination,
                remedy="choose another output folder",
            )
    if os.path.lexists(destination) and not may_replace(destination, force=False):
        raise InputError(
            "the output exists already", file=destination, remedy="choose another folder, or move it away"
        )


def publish(destination: Path, *, force: bool) -> Path | None:
    """Sync the finished folder that `begin` returned and rename it to `destination`.

    A folder there that it `may_replace` is exchanged in one step, and then removed. Returns the path of the working
    folder if the system refuses to remove the old folder in it, else None. Raises EnvironmentFault if anything else is
    at `destination`, and does not touch it.
    """
    folder = partial_of(destination) / "new"
    for path in folder.rglob("*"):
        (sync_folder if path.is_dir() else sync_file)(path)
    sync_folder(folder)
    try:
        if not may_replace(destination, force=force):
            _rename_to_free(folder, destination)
        elif not rename_with_flag(folder, destination, EXCHANGE):
            _replace_in_two_steps(folder, destination)
    except OSError as error:
        raise environment_fault(error, destination) from error
    sync_folder(destination.parent)
    return discard(destination)


def _rename_to_free(folder: Path, destination: Path) -> None:
    """Rename, but never onto anything that exists. Without renameat2 another process may create it after the check."""
    if rename_with_flag(folder, destination, NOREPLACE):
        return
    if os.path.lexists(destination):
        raise EnvironmentFault(
            "the output appeared while the run was working",
            file=destination,
            remedy="move it away and run the same command again: it continues where it stopped",
        )
    folder.rename(destination)


def _replace_in_two_steps(folder: Path, destination: Path) -> None:
    """Rename the old folder aside and the new one to `destination`, for systems that cannot exchange two folders.

    If the second rename fails, the old folder is put back.
    """
    aside = _aside_of(destination)
    destination.rename(aside)
    try:
        folder.rename(destination)
    except OSError:
        aside.rename(destination)
        raise
