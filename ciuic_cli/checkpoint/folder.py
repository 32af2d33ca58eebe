"""A checkpoint folder on disk: where it is, which of its files may be opened, and its JSON files.

`locate` takes a path or a hub id and returns the folder. `checked_file` takes a file name and returns the real path.
The folder is not trusted: no file outside it is ever opened, even if an index names it or a symbolic link points to it.
The one exception is the hub's cache, where `snapshots/<revision>/file` links to `blobs/<hash>`.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from ciuic_cli.errors import CiuicError, EnvironmentFault, InputError
from ciuic_cli.hub.download import TOKENIZER_ENDINGS, download, hub_id
from ciuic_cli.process.file_faults import reading

_MAX_CONFIG_BYTES = 16 << 20
"""Largest accepted JSON file, unless the caller states another limit. Chosen far above any real config.json."""
MAX_TEXT_BYTES = 256 << 20
"""Largest accepted file that is read as a whole: the index and the tokenizer's files. Chosen, as above."""
_OPENED_SUFFIXES = (".safetensors", ".json", ".txt", *TOKENIZER_ENDINGS, "LICENSE")
"""Endings of the names of files that this package or a tokenizer's loader opens."""
_TEMPLATES = "additional_chat_templates"
"""Subfolder from which transformers reads chat templates."""
_DOWNLOAD_AGAIN = "download the checkpoint again"


def locate(path: str | Path) -> Path:
    """The checkpoint's folder: `path` itself, or the downloaded snapshot if `path` is a hub id.

    A hub id is `org/name` or `org/name@revision`. Only safetensors, JSON and tokenizer files are downloaded. Raises
    InputError if there is no such folder, or if the hub does not have the model or cannot be reached; EnvironmentFault
    if permission to read the folder is missing.
    """
    folder = Path(path)
    if os.path.isdir(folder):  # Path.is_dir raises for some impossible paths
        if not os.access(folder, os.R_OK | os.X_OK):
            raise EnvironmentFault(
                "the folder cannot be read: permission denied", file=folder, remedy="check its permissions"
            )
        return folder
    if os.path.exists(folder):
        raise InputError(
            "this is a file, not a checkpoint folder", file=folder, remedy="give the folder that contains it"
        )
    found = None if isinstance(path, Path) else hub_id(str(path))
    if found is None:
        raise InputError(
            "no such folder", file=folder, remedy="check the path, or give a hub id such as org/name"
        )
    return download(*found)


@contextmanager
def require_unreplaced(folder: Path) -> Iterator[None]:
    """Raise InputError if the folder is replaced by another one during the block.

    In that case the block has read files of both folders.
    """

    def identity() -> tuple[int, int] | None:
        try:
            status = folder.stat()
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    before = identity()
    replaced = InputError(
        "the folder was replaced while it was read", file=folder, remedy="run the same command again"
    )
    try:
        yield
    except (CiuicError, OSError) as error:
        if identity() != before:
            raise replaced from error
        raise
    if identity() != before:
        raise replaced


def is_outside(name: str) -> bool:
    """Whether a relative file name points outside its folder, or does so on another operating system."""
    path = PurePosixPath(name)
    return "\\" in name or "\0" in name or ".." in path.parts or path.is_absolute()


def checked_file(folder: Path, name: str) -> Path:
    """The real path of `folder/name`: a regular file inside the folder or in the blobs of the hub's cache.

    Raises InputError if the name or a symbolic link leads elsewhere, or if the file is absent or not regular.
    """
    if not name or is_outside(name):
        raise InputError(
            f"the name {name!r:.200} points outside the checkpoint folder",
            file=folder,
            remedy="it is never opened; get the checkpoint from a source that you trust",
        )
    root = folder.resolve()
    link = folder / name
    try:
        real = link.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # Python < 3.13 raises RuntimeError for a circle
        raise InputError(
            "the path cannot be followed: a circle of symbolic links, or a name that no file can have",
            file=link,
            remedy=_DOWNLOAD_AGAIN,
        ) from error
    allowed_roots = [root]
    if root.parent.name == "snapshots":
        allowed_roots.append(root.parent.parent / "blobs")
    if not any(real.is_relative_to(allowed) for allowed in allowed_roots):
        raise InputError(
            f"a symbolic link leads outside the checkpoint folder, to {real}",
            file=link,
            remedy="it is never followed; copy the file into the folder if you trust it",
        )
    try:
        mode = os.stat(real).st_mode
    except OSError as error:
        raise InputError(
            f"cannot open the file: {error.strerror}", file=link, remedy="check the path and its permissions"
        ) from error
    if not stat.S_ISREG(mode):
        raise InputError("not a regular file", file=link, remedy=_DOWNLOAD_AGAIN)
    return real


def check_files(folder: Path) -> None:
    """Check every file of the folder that this package or a tokenizer's loader may open.

    Raises InputError for a symbolic link that leaves the folder, as `checked_file` does, and for a text file larger
    than MAX_TEXT_BYTES.
    """
    for entry in [*folder.iterdir(), *(folder / _TEMPLATES).glob("*")]:
        if not entry.name.endswith((*_OPENED_SUFFIXES, _TEMPLATES)):
            continue
        name = str(entry.relative_to(folder))
        if entry.is_symlink():
            checked_file(folder, name)
        if entry.suffix != ".safetensors" and entry.is_file():
            _require_size(entry, MAX_TEXT_BYTES)


def _require_size(file: Path, max_bytes: int) -> None:
    size = file.stat().st_size
    if size > max_bytes:
        raise InputError(
            f"the file has {size} bytes; at most {max_bytes} are accepted", file=file, remedy=_DOWNLOAD_AGAIN
        )


def read_json(
    folder: Path, name: str, max_bytes: int = _MAX_CONFIG_BYTES, *, remedy: str = _DOWNLOAD_AGAIN
) -> dict[str, Any]:
    """The JSON object in `folder/name`. `remedy` is the advice for a damaged file.

    Raises InputError if the file is absent, longer than `max_bytes`, not readable for this user, or not a JSON object;
    EnvironmentFault if reading it fails.
    """
    file = checked_file(folder, name)
    _require_size(file, max_bytes)
    with reading(folder / name):
        try:
            content = file.read_bytes()
        except PermissionError as error:
            raise InputError(
                f"cannot read the file: {error.strerror}", file=folder / name, remedy="check its permissions"
            ) from error
    try:
        value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InputError(f"not a JSON file: {reason}", file=folder / name, remedy=remedy) from error
    if not isinstance(value, dict):
        raise InputError("the JSON is not an object", file=folder / name, remedy=remedy)
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json. Raises InputError if it is absent or not a JSON object."""
    if not os.path.lexists(folder / "config.json"):
        raise InputError(
            "the folder has no config.json",
            file=folder,
            remedy="give the folder of a Hugging Face model: config.json beside its safetensors files",
        )
    return read_json(folder, "config.json")
