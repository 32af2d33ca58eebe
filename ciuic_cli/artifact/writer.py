"""Writes an artifact: under a temporary name, synced, then renamed. A folder is either complete or absent."""

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
from ciuic_cli.process.digests import file_digest

CHECKSUMS = "ciuic_checksums.json"
REPORT = "memory_report.json"
_COPIED = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model",
    "tekken.json", "chat_template.jinja", "chat_template.json", "LICENSE", "LICENSE.txt",
)  # fmt: skip


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
