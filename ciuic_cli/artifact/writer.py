"""Writes the files of an artifact into a folder; `publishing` then gives the folder its name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ciuic_cli.artifact.layout import Shard, index_json
from ciuic_cli.checkpoint.folder import checked_file
from ciuic_cli.errors import InputError
from ciuic_cli.hub.download import TOKENIZER_ENDINGS
from ciuic_cli.process.digests import file_digest

CHECKSUMS = "ciuic_checksums.json"
"""The list of SHA-256 checksums, for `ciuic inspect --verify`."""
REPORT = "memory_report.json"
"""The memory report (`report/schema.py`)."""
REPORT_PAGE = "memory_report.html"
"""The memory report as a page for people."""
_COPIED = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model",
    "tekken.json", "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json",
    "chat_template.json",
)  # fmt: skip
"""Files of a checkpoint that are copied into the artifact if they exist: data, never code."""
_COPIED_STARTS = ("LICENSE", "NOTICE")
"""Beginnings of the names of further files that are copied. Files with TOKENIZER_ENDINGS are copied, too."""

Payload = Callable[[str], bytes | Iterable[memoryview]]
"""The bytes of the named tensor, at once or in consecutive pieces."""


def write_shards(
    shards: Iterable[Shard], folder: Path, payload: Payload, progress: Callable[[int], None]
) -> None:
    """Write and sync the safetensors files, one tensor, or one piece of it, in memory at a time.

    payload: called for the tensors in the order of the layout. progress: called with the number of bytes just written.
    Raises RuntimeError if a tensor has other bytes than the layout planned.
    """
    for shard in shards:
        with (folder / shard.file).open("wb") as file:
            file.write(shard.header)
            progress(len(shard.header))
            for tensor in shard.tensors:
                data = payload(tensor.name)
                count = 0
                for piece in (data,) if isinstance(data, bytes) else data:
                    file.write(piece)
                    count += len(piece)
                    progress(len(piece))
                if count != tensor.nbytes:
                    raise RuntimeError(f"{tensor.name}: {count} bytes, {tensor.nbytes} were planned")
            file.flush()
            os.fsync(file.fileno())


def companions(source: Path) -> dict[str, Path]:
    """The files of a checkpoint that are copied into its artifact: names and real paths.

    Raises InputError if one leads outside the checkpoint or cannot be read.
    """
    names = {
        entry.name
        for entry in source.iterdir()
        if entry.name in _COPIED
        or entry.name.startswith(_COPIED_STARTS)
        or entry.name.endswith(TOKENIZER_ENDINGS)
    }
    files = {name: checked_file(source, name) for name in sorted(names) if (source / name).is_file()}
    for name, path in files.items():
        try:
            path.open("rb").close()
        except OSError as error:
            raise InputError(
                f"cannot read the file: {error.strerror}", file=source / name, remedy="check its permissions"
            ) from error
    return files


def copy_companions(source: Path, folder: Path) -> None:
    """Copy the tokenizer and generation files of the checkpoint `source` into `folder`."""
    for name, path in companions(source).items():
        shutil.copyfile(path, folder / name)


def write_index(shards: list[Shard], folder: Path) -> None:
    """Write the index of a sharded artifact; a single file has none."""
    if len(shards) > 1:
        (folder / "model.safetensors.index.json").write_text(index_json(shards), encoding="utf-8")


def write_config(folder: Path, source: dict[str, Any], quantization: dict[str, Any]) -> None:
    """Write the source's config.json with this artifact's `quantization_config`, and without `auto_map`.

    `auto_map` names code in the source's folder, which is not copied.
    """
    config = {key: value for key, value in source.items() if key not in ("auto_map", "quantization_config")}
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_checksums(folder: Path) -> None:
    """Write the list with SHA-256 and size of every file in the folder."""
    files = {}
    for path in sorted(folder.iterdir()):
        files[path.name] = {"sha256": file_digest(path), "bytes": path.stat().st_size}
    (folder / CHECKSUMS).write_bytes(encode_checksums({"algorithm": "sha256", "files": files}))


def encode_checksums(document: dict[str, Any]) -> bytes:
    """The list of checksums as bytes, in the only form that verification accepts."""
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()
