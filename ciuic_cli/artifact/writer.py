"""Writes an artifact: under a temporary name, synced, then renamed. A folder is either complete or absent."""

from __future__ import annotations

import ctypes
import errno
import glob
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ciuic_cli.artifact.layout import Shard, index_json
from ciuic_cli.checkpoint.folder import checked_file
from ciuic_cli.digests import file_digest
from ciuic_cli.errors import EnvironmentFault, InputError

CHECKSUMS = "ciuic_checksums.json"
REPORT = "memory_report.json"
_COPIED = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model",
    "tekken.json", "chat_template.jinja", "chat_template.json", "LICENSE", "LICENSE.txt",
)  # fmt: skip


def sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, data: bytes) -> None:
    """A file with `data`, complete and synced, or as it was before."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise environment_fault(error, path) from error
        raise


def environment_fault(error: OSError | SafetensorError, path: Path) -> EnvironmentFault:
    """A failed write in the words of the user: full disk, no permission, and what to do about it."""
    remedies = {
        errno.ENOSPC: "free disk space and run the same command again: it goes on where it stopped",
        errno.EDQUOT: "your disk quota is used up; free some and run the same command again",
        errno.EFBIG: "raise the limit on the size of files (ulimit -f) and run the same command again",
        errno.EACCES: "check the permissions of the folder",
        errno.EPERM: "check the permissions of the folder",
        errno.EROFS: "the file system is read-only; choose another output folder",
    }
    code = _number(error)
    reason = os.strerror(code) if code else str(error)
    return EnvironmentFault(
        f"cannot write: {reason}",
        file=path,
        remedy=remedies.get(code, "check the disk and run the same command again"),
    )


def _number(error: OSError | SafetensorError) -> int:
    """The system's error number; 0 if there is none. safetensors only has it in its text: "(os error 28)"."""
    if isinstance(error, OSError):
        return error.errno or 0
    found = re.search(r"os error (\d+)", str(error))
    return int(found[1]) if found else 0


def is_writable(folder: Path) -> bool:
    """Whether files may be made in the folder. A mode without any write bit counts for the superuser too."""
    return os.access(folder, os.W_OK | os.X_OK) and bool(folder.stat().st_mode & 0o222)


def may_rename(path: Path) -> bool:
    """Whether the sticky bit of its folder lets us rename `path`: then only its owner or the folder's may."""
    parent = path.parent.stat()
    return not parent.st_mode & stat.S_ISVTX or os.geteuid() in (0, parent.st_uid, path.stat().st_uid)


def clear_away(path: Path) -> None:
    """Remove a file, a folder with all that is in it, or a link but not what it leads to; or nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def require_space(destination: Path, nbytes: int) -> None:
    """Raise EnvironmentFault if the disk has not even `nbytes` free for what will be written beside `destination`.

    What an unfinished run has written there already counts as free: it need not be written again.
    """
    parent = next(path for path in destination.parents if path.exists())
    begun = sum(
        path.stat().st_size
        for path in destination.parent.glob(f".{glob.escape(destination.name)}.*/**/*")
        if path.is_file()
    )
    free = shutil.disk_usage(parent).free
    if free + begun < nbytes:
        raise EnvironmentFault(
            f"the disk is full: about {nbytes:,} bytes are needed, {free:,} are free",
            file=parent,
            remedy="free disk space, or choose an output folder on another disk",
        )


def write_shards(
    shards: Iterable[Shard], folder: Path, payload: Callable[[str], bytes], progress: Callable[[int], None]
) -> None:
    """Write the safetensors files; `payload(name)` gives one tensor's bytes at a time."""
    for shard in shards:
        with (folder / shard.file).open("wb") as file:
            file.write(shard.header)
            progress(len(shard.header))
            for tensor in shard.tensors:
                data = payload(tensor.name)
                if len(data) != tensor.nbytes:
                    raise RuntimeError(f"{tensor.name}: {len(data)} bytes, {tensor.nbytes} were planned")
                file.write(data)
                progress(len(data))
            file.flush()
            os.fsync(file.fileno())


def companions(source: Path) -> dict[str, Path]:
    """The tokenizer's and generation's files (never code) of a checkpoint: names and real paths.

    Raises InputError if one leads outside the checkpoint or cannot be read.
    """
    found = {name: checked_file(source, name) for name in _COPIED if (source / name).is_file()}
    for name, path in found.items():
        try:
            path.open("rb").close()
        except OSError as error:
            raise InputError(
                f"cannot read the file: {error.strerror}", file=source / name, remedy="check its permissions"
            ) from error
    return found


def copy_companions(source: Path, folder: Path) -> None:
    for name, path in companions(source).items():
        shutil.copyfile(path, folder / name)


def write_index(shards: list[Shard], folder: Path) -> None:
    if len(shards) > 1:
        (folder / "model.safetensors.index.json").write_text(index_json(shards), encoding="utf-8")


def write_config(folder: Path, source: dict[str, Any], quantization: dict[str, Any]) -> None:
    """The source's config.json with this artifact's quantization_config; no key that names code survives."""
    config = {key: value for key, value in source.items() if key not in ("auto_map", "quantization_config")}
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_checksums(folder: Path) -> None:
    """SHA-256 and size of every file in the folder, for `ciuic inspect --verify`."""
    files = {}
    for path in sorted(folder.iterdir()):
        files[path.name] = {"sha256": file_digest(path), "bytes": path.stat().st_size}
    document = {"algorithm": "sha256", "files": files}
    (folder / CHECKSUMS).write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")


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
        clear_away(path)
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
        elif _renamed(folder, destination, _EXCHANGE):
            old = folder
        else:
            old = _replace_in_two_steps(folder, destination)
    except OSError as error:
        raise environment_fault(error, destination) from error
    sync_folder(destination.parent)
    return None if old is None or _removed(old) else old


def _rename_to_free(folder: Path, destination: Path) -> None:
    """Rename, but never onto anything. Without renameat2 a moment passes between the look and the step."""
    if _renamed(folder, destination, _NOREPLACE):
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


_NOREPLACE, _EXCHANGE = 1, 2
"""Flags of Linux' renameat2."""


def _renamed(first: Path, second: Path, flag: int) -> bool:
    """Rename with renameat2; False where the system cannot or refuses."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    at_working_directory = -100
    return bool(
        rename(at_working_directory, os.fsencode(first), at_working_directory, os.fsencode(second), flag) == 0
    )
