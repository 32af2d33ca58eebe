"""Checks of the output folder before any work: it is not the input, no other run writes it, and it can be written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import psutil

from ciuic_cli.artifact import publishing
from ciuic_cli.artifact.writer import companions
from ciuic_cli.checkpoint.reader import Checkpoint
from ciuic_cli.compression.journal import Journal
from ciuic_cli.errors import InputError
from ciuic_cli.process import atomic_files, work_folders


def check_apart(out: Path, checkpoint: Checkpoint, calibration: Sequence[str | Path]) -> None:
    """Raise InputError if the output is the input, lies inside it, or contains a file that the run reads."""
    source = checkpoint.folder.resolve()
    if out == source or source in out.parents:
        raise InputError("the output is the input", file=out, remedy="choose another output folder")
    for path in (source, *checkpoint.files(), *companions(checkpoint.folder).values(), *calibration):
        if out in Path(os.path.realpath(path)).parents:
            raise InputError(
                "the input lies inside the output", file=path, remedy="choose another output folder"
            )


def check_no_other_run(out: Path) -> None:
    """Raise EnvironmentFault if a run is writing this folder, or one that contains it."""
    for folder in (out, *out.parents):
        Journal(folder).require_free()


def check_no_run_inside(out: Path) -> None:
    """Raise EnvironmentFault if a run works inside the output, InputError if an unfinished run left its folder there.

    Replacing the output would destroy that run's finished steps.
    """
    for parent, names, _ in os.walk(out):
        for name in names:
            folder = Path(parent, name)
            if not (work_folders.is_reserved(name) and work_folders.is_marked(folder)):
                continue
            if name.endswith(work_folders.JOURNAL):
                inner = name.removeprefix(".").removesuffix(work_folders.JOURNAL)
                Journal(Path(parent, inner)).require_free()
            raise InputError(
                "an unfinished run left its working folder inside the output",
                file=folder,
                remedy="finish that run or remove the folder, or choose another output folder",
            )


def check_output(out: Path, *, force: bool) -> None:
    """Raise InputError if the output holds files (with `force`: files that are no artifact) or cannot be written."""
    parent = _existing_parent(out)
    _check_name(out)
    for mounted in _mount_points(out):
        raise InputError("a file system is mounted there", file=mounted, remedy="choose a folder inside it")
    if os.path.lexists(out) and not out.is_dir():
        raise InputError("the output is a file", file=out, remedy="choose a folder")
    if out.exists() and not publishing.may_replace(out, force=force) and not Journal(out).published():
        raise _existing(out, force)
    check_no_run_inside(out)
    for folder in (out, parent):
        if folder.exists() and not atomic_files.is_writable(folder):
            raise InputError(
                "the output's folder is read-only", file=folder, remedy="choose a folder you can write to"
            )
    if out.exists() and not atomic_files.may_rename(out):
        raise InputError(
            "the output belongs to another user, and only its owner may replace it (sticky folder)",
            file=out,
            remedy="choose another output folder",
        )


def _existing(out: Path, force: bool) -> InputError:
    if publishing.may_replace(out, force=True):
        return InputError(
            "the output exists already",
            file=out,
            remedy="choose another folder, or replace it with --force (in Python: force=True)",
        )
    return InputError(
        f"the output exists already, and ciuic did not write it{': --force does not replace it' if force else ''}",
        file=out,
        remedy="choose another folder, or move this one away",
    )


def _check_name(out: Path) -> None:
    """Raise InputError if the output is a working folder or lies in one, or the names of its own are taken."""
    if work_folders.is_reserved(out.name):
        raise InputError(
            "the output has a name that ciuic keeps for working folders",
            file=out,
            remedy="choose another name",
        )
    for parent in out.parents:
        if work_folders.is_marked(parent):
            raise InputError(
                "the output lies in a working folder of another run",
                file=parent,
                remedy="choose another output folder",
            )
    for ending in (work_folders.JOURNAL, work_folders.PARTIAL):
        work_folders.require_usable(work_folders.work_folder(out, ending))


def _mount_points(folder: Path) -> list[Path]:
    """Mount points at `folder` and below it: a rename cannot move another file system."""
    mounted = [Path(partition.mountpoint) for partition in psutil.disk_partitions(all=True)]
    return [mount for mount in mounted if mount.is_relative_to(folder)]


def _existing_parent(out: Path) -> Path:
    """The nearest existing parent folder; raises InputError if the output's path cannot be created below it."""
    try:
        str(out).encode()
    except UnicodeEncodeError as error:
        raise InputError("the output's path is not UTF-8", file=out, remedy="choose another name") from error
    # `out` has been resolved, so a link that is left is part of a loop.
    if any(os.path.islink(part) for part in (out, *out.parents)):
        raise InputError(
            "the output's path is a circle of symbolic links", file=out, remedy="choose another output folder"
        )
    missing = [folder for folder in out.parents if not os.path.exists(folder)]
    parent = out.parents[len(missing)]
    if not parent.is_dir():
        raise InputError(
            "the output lies below a file, not a folder", file=parent, remedy="choose another output folder"
        )
    limit = os.pathconf(parent, "PC_NAME_MAX")
    if any(len(os.fsencode(folder.name)) > limit for folder in (Journal(out).ended, *missing)):
        raise InputError(
            f"a name in the output's path is too long: it exceeds {limit} bytes with the work folder's ending",
            file=out,
            remedy="choose a shorter name",
        )
    return parent
