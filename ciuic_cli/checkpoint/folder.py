"""Which files of a checkpoint folder may be opened, and which of them are its shards.

A folder is someone else's: nothing outside it is ever opened, whether an index names it or a symbolic link
leads there. The one exception is the hub's own cache, where `snapshots/<revision>/file` links to
`blobs/<hash>` beside it.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from ciuic_cli.errors import CiuicError, EnvironmentFault, InputError
from ciuic_cli.process.file_faults import reading

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MAX_CONFIG_BYTES = 16 << 20
_MAX_READ_BYTES = 256 << 20
"""Of any file that is read whole: the index, and what a tokenizer's loader reads."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "LICENSE*", "README.md"]
_OPENED = (".safetensors", ".json", ".txt", ".model", ".jinja", ".tiktoken", "LICENSE")
_TEMPLATES = "additional_chat_templates"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_DOWNLOAD_AGAIN = "download the checkpoint again"


def locate(path: str | Path) -> Path:
    """The checkpoint's folder: `path` itself, or the hub's snapshot if `path` is a hub id such as `org/name`.

    From the hub come only safetensors, JSON and tokenizer files. Raises InputError if there is no such folder
    and the hub does not have it or cannot be reached, EnvironmentFault if the folder may not be read.
    """
    folder = Path(path)
    if os.path.isdir(folder):  # False for a path that no folder can have, where Path.is_dir raises
        if not os.access(folder, os.R_OK | os.X_OK):
            raise EnvironmentFault(
                "the folder cannot be read: permission denied", file=folder, remedy="check its permissions"
            )
        return folder
    if os.path.exists(folder):
        raise InputError(
            "this is a file, not a checkpoint folder", file=folder, remedy="give the folder that contains it"
        )
    name = str(path)
    if isinstance(path, Path) or not _HUB_ID.fullmatch(name):
        raise InputError(
            "no such folder", file=folder, remedy="check the path, or give a hub id such as org/name"
        )
    return _download(name)


@contextmanager
def unreplaced(folder: Path) -> Iterator[None]:
    """Raise InputError if the folder has become another one meanwhile: what was read, or refused, is of both."""

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


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except RepositoryNotFoundError as error:
        raise InputError(
            "no such folder, and the hub has no model of this name (or it is private)",
            file=name,
            remedy="check the name; for a private or gated model run `hf auth login` first",
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        raise InputError(
            f"no such folder, and the hub cannot be reached ({type(error).__name__})",
            file=name,
            remedy="check the path and the network, or download the model elsewhere and give its folder",
        ) from error


def checked_file(folder: Path, name: str) -> Path:
    """The real path of `folder/name`, a regular file inside the folder or in the hub cache's blobs.

    Raises InputError if the name or a symbolic link leads elsewhere, or if it is no regular file.
    """
    parts = PurePosixPath(name).parts
    if not name or "\\" in name or "\0" in name or ".." in parts or PurePosixPath(name).is_absolute():
        raise InputError(
            f"the name {name!r:.200} points outside the checkpoint folder",
            file=folder,
            remedy="it is never opened; get the checkpoint from a source that you trust",
        )
    root = folder.resolve()
    link = folder / name
    try:
        real = link.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a circle of links: RuntimeError before Python 3.13
        raise InputError(
            "the path cannot be followed: a circle of symbolic links, or a name that no file can have",
            file=link,
            remedy=_DOWNLOAD_AGAIN,
        ) from error
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    if not any(real.is_relative_to(place) for place in allowed):
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
    """Refuse symbolic links that leave the folder, and files too large to be what their name says, for every file
    that we or a tokenizer's loader might open.

    Raises InputError as `checked_file` does.
    """
    for entry in [*folder.iterdir(), *(folder / _TEMPLATES).glob("*")]:
        if not entry.name.endswith((*_OPENED, _TEMPLATES)):
            continue
        name = str(entry.relative_to(folder))
        if entry.is_symlink():
            checked_file(folder, name)
        if entry.suffix != ".safetensors" and entry.is_file():
            _require_size(entry, _MAX_READ_BYTES)


def _require_size(file: Path, most: int) -> None:
    size = file.stat().st_size
    if size > most:
        raise InputError(
            f"the file has {size} bytes; at most {most} are accepted", file=file, remedy=_DOWNLOAD_AGAIN
        )


def read_json(
    folder: Path, name: str, max_bytes: int = _MAX_CONFIG_BYTES, *, remedy: str = _DOWNLOAD_AGAIN
) -> dict[str, Any]:
    """The JSON object in `folder/name`. remedy: for a file that is damaged.

    Raises InputError if it is absent, too large, may not be read, or is not an object, EnvironmentFault if the disk
    refuses.
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


def shard_names(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """Names of the safetensors files in order, and the index's map from tensor to file (None without index).

    Raises InputError if there is no safetensors file (only pickles, only GGUF, none), several without an
    index, or if the index is unreadable, names files outside the folder or files that are absent.
    """
    present = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".safetensors"))
    if os.path.lexists(folder / INDEX_NAME):
        weight_map = _weight_map(folder)
        names = sorted(set(weight_map.values()))
        for name in names:
            if os.path.lexists(folder / name):
                checked_file(folder, name)
        absent = [name for name in names if not os.path.exists(folder / name)]
        _refuse_absent(absent, folder / INDEX_NAME)
        return names, weight_map
    if not present:
        _refuse_no_safetensors(folder)
    if len(present) > 1:
        raise InputError(
            f"{len(present)} safetensors files and no {INDEX_NAME}: which tensors count is a guess",
            file=folder,
            remedy=f"download {INDEX_NAME} too, or leave only the file that is meant",
        )
    part = re.search(r"-(\d{1,9})-of-(\d{1,9})\.safetensors$", present[0])
    if part and int(part[2]) > 1:
        raise InputError(
            f"only part {int(part[1])} of {int(part[2])} is here, and no {INDEX_NAME}",
            file=folder / present[0],
            remedy=_DOWNLOAD_AGAIN,
        )
    return present, None


def _weight_map(folder: Path) -> dict[str, str]:
    file = folder / INDEX_NAME
    weight_map = read_json(folder, INDEX_NAME, _MAX_READ_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError("the index has no weight_map", file=file, remedy=_DOWNLOAD_AGAIN)
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(".safetensors"):
            raise InputError(
                f"the index names {name!r:.200}, not a safetensors file",
                file=file,
                tensor=tensor,
                remedy="convert the checkpoint to safetensors",
            )
        parts = PurePosixPath(name).parts
        if "\\" in name or "\0" in name or ".." in parts or PurePosixPath(name).is_absolute():
            raise InputError(
                f"the index names {name!r:.200}, outside the checkpoint folder",
                file=file,
                tensor=tensor,
                remedy="it is never opened; get the checkpoint from a source that you trust",
            )
    return weight_map


def _refuse_absent(absent: list[str], index: Path) -> None:
    if absent:
        raise InputError(
            f"the index names {len(absent)} shard(s) that are absent: {', '.join(absent)}",
            file=index,
            remedy="download the missing files",
        )


def _refuse_no_safetensors(folder: Path) -> None:
    names = [entry.name for entry in folder.iterdir()]
    pickles = sorted(name for name in names if name.endswith(_PICKLES))
    if pickles:
        raise InputError(
            f"only pickle weights ({', '.join(pickles[:3])}), no safetensors; a pickle can run code",
            file=folder,
            remedy='look for a safetensors version, or convert it where you trust it: python -c "from '
            "transformers import AutoModelForCausalLM as M; M.from_pretrained('IN', dtype='auto')"
            ".save_pretrained('OUT')\"",
        )
    gguf = sorted(name for name in names if name.endswith(".gguf"))
    if gguf:
        raise InputError(
            f"a GGUF file ({gguf[0]}), no safetensors",
            file=folder,
            remedy="give the original safetensors checkpoint; a GGUF file is compressed already",
        )
    raise InputError(
        "the folder has no safetensors file", file=folder, remedy="give the folder of a Hugging Face model"
    )
