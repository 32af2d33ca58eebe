"""Training data as lines of JSON: from a file, a folder of files, or a dataset of Hugging Face's `datasets`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ciuic_cli.errors import EnvironmentFault, InputError
from ciuic_cli.text.documents import opened

SAVED = ("dataset_info.json", "dataset_dict.json")
"""Files by which a folder of `datasets.save_to_disk` is recognised: of one dataset, and of several splits."""


def records(path: Path) -> Iterator[tuple[Path, int, str]]:
    """The file, number and text of every line. Rows of a dataset are numbered from 1, fields without a value left out.

    Args:
        path: JSON lines in UTF-8; a folder of `*.jsonl` and `*.parquet`, read in the order of their names; or a folder
            that `datasets.save_to_disk` wrote.

    Raises:
        InputError: nothing of this is there, or it cannot be read.
        EnvironmentFault: `datasets` is needed and not installed.
    """
    if not path.is_dir():
        yield from ((path, number, line) for number, line in _lines(path))
    elif any((path / name).is_file() for name in SAVED):
        yield from ((path, number, line) for number, line in _rows(path, _saved(path)))
    else:
        for file in _data_files(path):
            found = _lines(file) if file.suffix == ".jsonl" else _rows(file, _parquet(file))
            yield from ((file, number, line) for number, line in found)


def digest(path: Path) -> tuple[int, str]:
    """Bytes and SHA-256 of a file, or of all files in a folder with their names."""
    if not path.is_dir():
        data = path.read_bytes()
        return len(data), hashlib.sha256(data).hexdigest()
    total, whole = 0, hashlib.sha256()
    for file in sorted(one for one in path.rglob("*") if one.is_file()):
        data = file.read_bytes()
        total += len(data)
        whole.update(str(file.relative_to(path)).encode() + b"\0" + hashlib.sha256(data).digest())
    return total, whole.hexdigest()


def _data_files(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.iterdir() if file.suffix in (".jsonl", ".parquet"))
    if not files:
        raise InputError(
            "the folder has no training data",
            file=folder,
            remedy="put .jsonl or .parquet files into it, or give the output of datasets.save_to_disk",
        )
    return files


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with opened(path) as file:
        for number, raw in enumerate(file, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                raise InputError(
                    f"line {number}: byte {error.start + 1} is not UTF-8",
                    file=path,
                    remedy="convert the file to UTF-8",
                ) from error
            if line:
                yield number, line


def _rows(path: Path, dataset: Any) -> Iterator[tuple[int, str]]:
    for number, row in enumerate(dataset, start=1):
        try:
            yield number, json.dumps({name: value for name, value in row.items() if value is not None})
        except TypeError as error:
            raise InputError(
                f"line {number}: {error}", file=path, remedy="keep only columns of text and messages"
            ) from error


def _datasets(path: Path) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise EnvironmentFault(
            "this training data needs the package datasets", file=path, remedy='pip install "ciuic-cli[data]"'
        ) from error
    return datasets


def _saved(path: Path) -> Any:
    library = _datasets(path)
    try:
        found = library.load_from_disk(str(path))
    except Exception as error:  # the library and pyarrow raise errors of many kinds
        raise _unreadable(path, error) from error
    if isinstance(found, dict):
        raise InputError(
            f"the folder has {len(found)} splits: {', '.join(sorted(found))}",
            file=path,
            remedy="give the folder of one of them",
        )
    return found


def _parquet(path: Path) -> Any:
    library = _datasets(path)
    try:
        return library.Dataset.from_parquet(str(path), keep_in_memory=True)
    except Exception as error:  # as above
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> InputError:
    reason = " ".join(str(error).split())
    return InputError(f"datasets cannot read it: {reason:.200}", file=path, remedy="write the data again")
