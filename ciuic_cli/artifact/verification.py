"""Compares the files of an artifact with their checksums: `ciuic inspect --verify`."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ciuic_cli.artifact.writer import CHECKSUMS, encode_checksums
from ciuic_cli.checkpoint.folder import checked_file, locate, read_json, require_unreplaced
from ciuic_cli.errors import CiuicError, InputError
from ciuic_cli.process.file_faults import reading

_BLOCK = 1 << 20
"""Bytes read at a time (chosen)."""
_REMEDY = "fetch the artifact again, or compress the original again"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Verification:
    """The result of `verify`.

    files, nbytes: number and bytes of the files in the list. problems: (file name, what is wrong), empty if all are
    intact. unlisted: files without a checksum that are no weights, such as a README that someone added; not an error.
    """

    files: int
    nbytes: int
    problems: tuple[tuple[str, str], ...]
    unlisted: tuple[str, ...]

    def require_intact(self, folder: Path) -> None:
        """Raise InputError naming the first damaged file, and the count, unless there are no problems."""
        if self.problems:
            name, problem = self.problems[0]
            more = f" ({len(self.problems)} damaged files in all)" if len(self.problems) > 1 else ""
            raise InputError(f"the artifact is damaged: {problem}{more}", file=folder / name, remedy=_REMEDY)


def verify(path: str | Path, progress: Callable[[int, int], None] = lambda done, total: None) -> Verification:
    """Compare size and SHA-256 of every file with `ciuic_checksums.json`.

    The list itself must have exactly the form in which the writer writes it. So a flipped bit in the list is found too.

    progress: called as progress(done, total), in bytes. Raises InputError if the folder has no list or a damaged one,
    EnvironmentFault if a file cannot be read.
    """
    folder = locate(path)
    with require_unreplaced(folder):
        return _verify(folder, progress)


def _verify(folder: Path, progress: Callable[[int, int], None]) -> Verification:
    listed = _read_list(folder)
    problems: list[tuple[str, str]] = []
    total = sum(size for _, size in listed.values())
    done = 0
    for name, (digest, size) in sorted(listed.items()):
        problem = _check_file(folder, name, digest, size)
        if problem is not None:
            problems.append((name, problem))
        done += size
        progress(done, total)
    unlisted = []
    for entry in sorted(folder.iterdir()):
        if entry.name in listed or entry.name == CHECKSUMS:
            continue
        if entry.name.endswith(".safetensors"):
            problems.append((entry.name, "weights without a checksum: not a file of this artifact"))
        else:
            unlisted.append(entry.name)
    return Verification(len(listed), total, tuple(problems), tuple(unlisted))


def _read_list(folder: Path) -> dict[str, tuple[str, int]]:
    """SHA-256 (hexadecimal) and size of every listed file."""
    file = folder / CHECKSUMS
    if not file.exists():
        raise InputError(
            "the folder has no checksums",
            file=file,
            remedy="only `ciuic compress` writes them; save_pretrained and other tools do not",
        )
    document = read_json(folder, CHECKSUMS, remedy=_REMEDY)
    # Finds a flipped bit anywhere in the list, also in its white space.
    with reading(file):
        content = checked_file(folder, CHECKSUMS).read_bytes()
    if content != encode_checksums(document):
        raise _damaged_list(file, "it differs from the form in which ciuic writes it")
    files = document.get("files")
    if (
        document.get("algorithm") != "sha256"
        or set(document) != {"algorithm", "files"}
        or not isinstance(files, dict)
    ):
        raise _damaged_list(file, "it must have exactly the keys algorithm, which is sha256, and files")
    listed = {}
    for name, value in files.items():
        if (
            not isinstance(value, dict)
            or set(value) != {"sha256", "bytes"}
            or not isinstance(value["sha256"], str)
            or not _SHA256.fullmatch(value["sha256"])
            or type(value["bytes"]) is not int
            or not 0 <= value["bytes"] < 1 << 63
        ):
            raise _damaged_list(file, f"the entry of {name!r:.100} is not a SHA-256 and a size")
        listed[name] = (value["sha256"], value["bytes"])
    return listed


def _damaged_list(file: Path, problem: str) -> InputError:
    return InputError(f"the list of checksums is damaged: {problem}", file=file, remedy=_REMEDY)


def _check_file(folder: Path, name: str, digest: str, size: int) -> str | None:
    """The fault of the file as a message; None if it is intact."""
    if not os.path.exists(folder / name):  # Path.exists would raise for a name that no file can have
        return "the file is missing"
    try:
        file = checked_file(folder, name)
    except CiuicError as error:
        return error.message
    with reading(folder / name):
        actual = file.stat().st_size
        if actual != size:
            return f"the file has {actual} bytes, not {size}"
        sha256 = hashlib.sha256()
        with file.open("rb") as stream:
            while block := stream.read(_BLOCK):
                sha256.update(block)
    return None if sha256.hexdigest() == digest else "its content does not match its checksum"
