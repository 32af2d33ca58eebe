"""The headers of a hub model's weights, without the weights."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ciuic_cli.errors import InputError
from ciuic_cli.hub.download import INDEX_NAME, hub_faults, repository, wanted_files

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

_DESCRIBING = ("config.json", INDEX_NAME, "memory_report.json")
"""Files that describe a checkpoint or an artifact, besides its headers."""
_REQUESTS = 8
"""Headers that are fetched at a time. Chosen, not tuned."""


@contextmanager
def headers_only(name: str, revision: str | None) -> Iterator[Path]:
    """A temporary folder like the model's, in which the safetensors files have their headers and sizes, but no data.

    The files are sparse: they take no space on disk. It has no tokenizer. Raises InputError as `download` does.
    """
    with tempfile.TemporaryDirectory(prefix="ciuic-") as scratch:
        folder = Path(scratch)
        with hub_faults(name):
            fetch_headers(name, revision, folder)
        yield folder


def fetch_headers(
    name: str, revision: str | None, folder: Path, *, only_describing: bool = True
) -> ModelInfo:
    """Fill the folder with sparse safetensors files and the files that describe the model, or all files besides."""
    from huggingface_hub import HfApi, hf_hub_download

    info = repository(name, revision)
    sizes = {file.rfilename: file.size for file in info.siblings or ()}

    def fetch(file: str) -> None:
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.endswith(".safetensors"):
            header = HfApi().parse_safetensors_file_metadata(name, file, revision=info.sha)
            _write_sparse(target, header, sizes[file] or 0, name)
        elif file in _DESCRIBING or not only_describing:
            target.write_bytes(Path(hf_hub_download(name, file, revision=info.sha)).read_bytes())

    with ThreadPoolExecutor(_REQUESTS) as pool:
        list(pool.map(fetch, wanted_files(name, info)))
    return info


def _write_sparse(target: Path, header: Any, size: int, name: str) -> None:
    """A safetensors file of this header and size whose data is a hole. header: SafetensorsFileMetadata."""
    entries: dict[str, Any] = {"__metadata__": header.metadata} if header.metadata else {}
    end = 0
    for tensor, info in header.tensors.items():
        entries[tensor] = {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": list(info.data_offsets),
        }
        end = max(end, info.data_offsets[1])
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    length = size - 8 - end
    if length < len(text):
        raise InputError(
            f"the file has {size} bytes, too few for its tensors",
            file=f"{name}/{target.name}",
            remedy="the repository is damaged; choose another one",
        )
    with target.open("wb") as file:
        file.write(length.to_bytes(8, "little") + text.ljust(length))
        file.truncate(size)
