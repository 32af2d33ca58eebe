"""Opens any model that can be measured: an artifact, or a checkpoint as `compress` reads it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from ciuic_cli.artifact.reader import open_artifact
from ciuic_cli.artifact.schema import is_artifact
from ciuic_cli.checkpoint.architecture import build_config, build_meta_model
from ciuic_cli.checkpoint.config.numbers import require_token_ids
from ciuic_cli.checkpoint.folder import locate, read_config, read_json, require_unreplaced
from ciuic_cli.checkpoint.model_map import map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.codecs import native
from ciuic_cli.errors import EnvironmentFault, InputError
from ciuic_cli.runtime.loading import choose_device, load, load_offloaded
from ciuic_cli.runtime.placement.choice import covering


def open_model(path: str | Path, device: str = "auto", dtype: torch.dtype | None = None) -> Any:
    """A transformers model in evaluation mode; compressed weights stay compressed.

    Args:
        path: artifact or checkpoint, a folder or a hub id. Tensors stored in FP8 or FP4 are decoded.
        dtype: of activations and dense weights; default: as the model is stored.

    Raises:
        InputError: the folder is unusable (see `open_checkpoint`, `open_artifact`).
        EnvironmentFault: there is no such device, or the weights do not fit into its memory.
    """
    folder = locate(path)
    target = choose_device(device)
    if is_artifact(read_config(folder)):
        with require_unreplaced(folder):
            # First: transformers would silently go on without a file that it cannot read.
            generation = open_generation_config(folder)
            return _ready(load(folder, device=target, dtype=dtype), generation)
    model_map = map_model(open_checkpoint(folder))
    _require_memory(model_map.stored_numel * (dtype or model_map.dtype).itemsize, target, folder)
    model = model_map.skeleton(dtype=dtype)
    model_map.materialise(model, "", dtype, target)
    return _ready(model, open_generation_config(folder))


@contextmanager
def artifact_in_memory(
    folder: Path, target: torch.device, layer_prefixes: Sequence[str], *, most: int
) -> Iterator[Any]:
    """An artifact as a transformers model in evaluation mode, in float32 on a CPU and in its own dtype elsewhere.

    If it does not fit into the free memory (on a CPU: into half of it, or into `most` bytes), the layers stay on disk,
    and transformers reads each one when it runs.

    Args:
        layer_prefixes: of the decoder layers' names, with a trailing dot.
    """
    on_cpu = target.type == "cpu"
    dtype = torch.float32 if on_cpu else None
    if expected_bytes(folder, dtype) <= (
        min(most, free_memory(target) // 2) if on_cpu else free_memory(target)
    ):
        yield open_model(folder, str(target), dtype)
        return
    with tempfile.TemporaryDirectory(prefix="ciuic-") as scratch:
        places = _layers_on_disk(folder, target, layer_prefixes)
        model = load_offloaded(folder, places, Path(scratch), dtype)
        yield _ready(model, open_generation_config(folder))


def _layers_on_disk(folder: Path, target: torch.device, layer_prefixes: Sequence[str]) -> dict[str, str]:
    """Module or parameter -> "disk" for decoder layers, else the device; together they are the whole model."""
    model = build_meta_model(build_config(read_config(folder)), torch.float32)
    return covering(model, {prefix.rstrip("."): "disk" for prefix in layer_prefixes}, str(target))


def _ready(model: Any, generation: Any) -> Any:
    """The model in evaluation mode, with named outputs whatever its config.json says."""
    model.generation_config = generation or model.generation_config
    model.config.return_dict = True
    return model.eval()


def open_generation_config(folder: Path) -> Any:
    """transformers' GenerationConfig of a model folder; None without a file. Raises InputError if the file is
    damaged."""
    from transformers import GenerationConfig

    name = "generation_config.json"
    if not (folder / name).is_file():
        return None
    values = read_json(folder, name)
    require_token_ids(values, folder / name)
    try:
        return GenerationConfig.from_dict(values)
    except Exception as error:
        raise InputError(
            f"transformers refuses it: {type(error).__name__}: {error!s:.300}",
            file=folder / name,
            remedy="download it again, or remove it",
        ) from error


def require_runnable(path: str | Path, device: str = "auto") -> None:
    """Raise EnvironmentFault if `path` is an artifact, the device is a CPU, and the native library does not load."""
    if is_artifact(read_config(locate(path))) and choose_device(device).type == "cpu":
        native.interface()


def file_bytes(path: str | Path) -> int:
    """Bytes of all safetensors files of an artifact or a checkpoint, headers included."""
    folder = locate(path)
    if is_artifact(read_config(folder)):
        return open_artifact(folder).file_bytes
    return open_checkpoint(folder).source_bytes


def expected_bytes(path: str | Path, dtype: torch.dtype | None) -> int:
    """Bytes that the model's weights will take in memory, from the headers; a checkpoint's in `dtype`, default: as
    stored."""
    folder = locate(path)
    if is_artifact(read_config(folder)):
        return open_artifact(folder).file_bytes
    model_map = map_model(open_checkpoint(folder))
    return model_map.stored_numel * (dtype or model_map.dtype).itemsize


def free_memory(target: torch.device) -> int:
    """Bytes that are free on the device now."""
    if target.type == "cuda":
        return int(torch.cuda.mem_get_info(target)[0])
    return int(psutil.virtual_memory().available)


def _require_memory(needed: int, target: torch.device, folder: Path) -> None:
    free = free_memory(target)
    if needed > free:
        raise EnvironmentFault(
            f"the weights take {needed / 1e9:.1f} GB; {free / 1e9:.1f} GB are free on {target}",
            file=folder,
            remedy="free memory, or use --device cpu" if target.type == "cuda" else "free memory",
        )
