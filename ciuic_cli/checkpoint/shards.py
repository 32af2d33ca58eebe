"""The shards of a checkpoint folder: which safetensors files hold its tensors, and whether the index agrees.

`shard_names` takes a folder and returns the file names and the index's map from tensor to file. `check_index` compares
that map with the tensors that the files hold.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from ciuic_cli.checkpoint.folder import MAX_TEXT_BYTES, checked_file, is_outside, read_json
from ciuic_cli.checkpoint.header import TensorEntry
from ciuic_cli.errors import InputError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_DOWNLOAD_AGAIN = "download the checkpoint again"
_MIXED_VERSIONS = "download the checkpoint again; do not mix the files of two versions"


def shard_names(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """Names of the safetensors files in order, and the index's map from tensor to file (None without an index).

    Raises InputError if there is no safetensors file (only pickles, only GGUF, nothing), if there are several without
    an index, or if the index is unreadable or names absent files or files outside the folder.
    """
    present = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".safetensors"))
    if os.path.lexists(folder / INDEX_NAME):
        weight_map = _read_weight_map(folder)
        names = sorted(set(weight_map.values()))
        for name in names:
            if os.path.lexists(folder / name):
                checked_file(folder, name)
        absent = [name for name in names if not os.path.exists(folder / name)]
        if absent:
            raise InputError(
                f"the index names {len(absent)} shard(s) that are absent: {', '.join(absent)}",
                file=folder / INDEX_NAME,
                remedy="download the missing files",
            )
        return names, weight_map
    if not present:
        raise _no_safetensors(folder)
    if len(present) > 1:
        raise InputError(
            f"{len(present)} safetensors files and no {INDEX_NAME}: it is unknown which tensors count",
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


def check_index(
    folder: Path, tensors: Mapping[str, TensorEntry], weight_map: dict[str, str] | None
) -> list[str]:
    """Compare the index with the `tensors` of all shards. Returns warnings; none if there is no index.

    Raises InputError if the index names a tensor that no shard has, or places it in another file.
    """
    if weight_map is None:
        return []
    lost = [name for name in weight_map if name not in tensors]
    if lost:
        raise InputError(
            f"the index names {len(lost)} tensor(s) that no shard has: {', '.join(lost[:3])}",
            file=folder / INDEX_NAME,
            tensor=lost[0],
            remedy=_MIXED_VERSIONS,
        )
    files = {name: checked_file(folder, name) for name in set(weight_map.values())}
    for name, file in weight_map.items():
        if tensors[name].file != files[file]:
            raise InputError(
                f"the index places the tensor in {file}; it is in {tensors[name].file.name}",
                file=folder / INDEX_NAME,
                tensor=name,
                remedy=_MIXED_VERSIONS,
            )
    warnings = []
    extra = [name for name in tensors if name not in weight_map]
    if extra:
        warnings.append(
            f"{len(extra)} tensor(s) are in the shards but not in the index: {', '.join(extra[:3])}"
        )
    if os.path.lexists(folder / SINGLE_NAME) and SINGLE_NAME not in weight_map.values():
        warnings.append(f"{SINGLE_NAME} is not named by the index and is ignored")
    return warnings


def _read_weight_map(folder: Path) -> dict[str, str]:
    """The index's `weight_map`, tensor -> file name. Raises InputError for names that are not safe to open."""
    file = folder / INDEX_NAME
    weight_map = read_json(folder, INDEX_NAME, MAX_TEXT_BYTES).get("weight_map")
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
        if is_outside(name):
            raise InputError(
                f"the index names {name!r:.200}, outside the checkpoint folder",
                file=file,
                tensor=tensor,
                remedy="it is never opened; get the checkpoint from a source that you trust",
            )
    return weight_map


def _no_safetensors(folder: Path) -> InputError:
    names = [entry.name for entry in folder.iterdir()]
    pickles = sorted(name for name in names if name.endswith(_PICKLES))
    if pickles:
        return InputError(
            f"only pickle weights ({', '.join(pickles[:3])}), no safetensors; a pickle can run code",
            file=folder,
            remedy='look for a safetensors version, or convert it where you trust it: python -c "from '
            "transformers import AutoModelForCausalLM as M; M.from_pretrained('IN', dtype='auto')"
            ".save_pretrained('OUT')\"",
        )
    gguf = sorted(name for name in names if name.endswith(".gguf"))
    if gguf:
        return InputError(
            f"a GGUF file ({gguf[0]}), no safetensors",
            file=folder,
            remedy="give the original safetensors checkpoint; a GGUF file is compressed already",
        )
    return InputError(
        "the folder has no safetensors file", file=folder, remedy="give the folder of a Hugging Face model"
    )
