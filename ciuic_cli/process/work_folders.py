"""Working folders beside an output, such as the journal.

Each holds a file that marks it. A folder without the mark may be the user's: unless it is empty, it is neither used nor
removed.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from ciuic_cli.errors import InputError
from ciuic_cli.process.atomic_files import remove_path

MARK = ".ciuic-working-folder"
"""Name of the empty file that marks a working folder. It is written first and removed last."""
JOURNAL, ENDED, PARTIAL, TRAINING = ".ciuic", ".ciuic.ended", ".partial", ".ciuic.train"
"""Endings of the working folders' names: the journal, a journal that is being removed, an unfinished artifact, and a
training run."""
_RESERVED = re.compile(r"\..+\.(?:ciuic|ciuic\.ended|ciuic\.train|partial|replaced)", re.DOTALL)
"""Names of working folders; earlier versions had one that ended in ".replaced"."""


def work_folder(out: Path, ending: str) -> Path:
    """The path of the working folder of the output `out`."""
    return out.parent / f".{out.name}{ending}"


def is_reserved(name: str) -> bool:
    """Whether a working folder of some output has this name, so that no output may have it."""
    return _RESERVED.fullmatch(name) is not None


def is_marked(folder: Path) -> bool:
    """Whether `folder` is a working folder; a link to one is none."""
    return not folder.is_symlink() and os.path.lexists(folder / MARK)


def may_use(folder: Path) -> bool:
    """Whether nothing of the user is there: the path is absent, a marked folder, or an empty one.

    A run that was killed between making a folder and marking it leaves an empty one.
    """
    try:
        return stat.S_ISDIR(folder.lstat().st_mode) and (is_marked(folder) or not os.listdir(folder))
    except FileNotFoundError:
        return True


def require_usable(folder: Path) -> None:
    """Raise InputError if something that ciuic did not make has the name of a working folder."""
    if not may_use(folder):
        raise InputError(
            "the name of a working folder is taken by something else",
            file=folder,
            remedy="move it away, or choose another output folder",
        )


def create(folder: Path) -> None:
    """Make the working folder, its parents and its mark. One that exists keeps its files.

    Raises InputError as `require_usable` does, and OSError.
    """
    require_usable(folder)
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / MARK
    if mark.is_symlink() or not mark.is_file():
        remove_path(mark)
        os.close(os.open(mark, os.O_CREAT | os.O_NOFOLLOW, 0o666))


def remove(folder: Path) -> None:
    """Remove the working folder, its mark last; anything that is no working folder stays. Raises OSError."""
    if not may_use(folder) or not folder.exists():
        return
    for path in folder.iterdir():
        if path.name != MARK:
            remove_path(path)
    (folder / MARK).unlink(missing_ok=True)
    folder.rmdir()
