"""Open any model that can be measured: an artifact, or a checkpoint, read as `compress` reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import torch

from ciuic_cli.artifact.reader import open_artifact
from ciuic_cli.artifact.schema import is_artifact
from ciuic_cli.checkpoint.architecture import require_token_ids
from ciuic_cli.checkpoint.folder import locate, read_config, read_json, require_unreplaced
from ciuic_cli.checkpoint.model_map import map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.errors import EnvironmentFault, InputError
from ciuic_cli.runtime.loading import choose_device, load


def open_model(path: str | Path, device: str = "auto", dtype: torch.dtype | None = None) -> Any:
    """A transformers model in evaluation mode, compressed weights still compressed.

    Args:
        path: artifact or checkpoint, a folder or a hub id. Tensors stored in FP8 or FP4 are decoded.
        dtype: of activations and dense weights; None: as the model is stored.

    Raises:
        InputError: whatever makes the folder unusable (see `open_checkpoint`, `open_artifact`).
        EnvironmentFault: no such device, or the weights do not fit into its memory.
    """
    folder = locate(path)
    place = choose_device(device)
    if is_artifact(read_config(folder)):
        with require_unreplaced(folder):
            # Before transformers reads it, and goes on without one that it cannot read.
            generation = open_generation_config(folder)
            return _answering(load(folder, device=place, dtype=dtype), generation)
    model_map = map_model(open_checkpoint(folder))
    _require_memory(model_map.stored_numel * (dtype or model_map.dtype).itemsize, place, folder)
    model = model_map.skeleton(dtype=dtype)
    model_map.materialise(model, "", dtype, place)
    return _answering(model, open_generation_config(folder))


def _answering(model: Any, generation: Any) -> Any:
    """The model in evaluation mode, its outputs with names, whatever its config.json asks for."""
    model.generation_config = generation or model.generation_config
    model.config.return_dict = True
    return model.eval()


def open_generation_config(folder: Path) -> Any:
    """transformers' GenerationConfig of a model's folder, None if there is none; raises InputError if it is damaged."""
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


def file_bytes(path: str | Path) -> int:
    """Bytes of all safetensors files of an artifact or a checkpoint."""
    folder = locate(path)
    if is_artifact(read_config(folder)):
        return open_artifact(folder).file_bytes
    return open_checkpoint(folder).source_bytes


def expected_bytes(path: str | Path, dtype: torch.dtype | None) -> int:
    """Bytes that the model's weights will take in memory, from the headers; dense ones in `dtype`, None: their own."""
    folder = locate(path)
    if is_artifact(read_config(folder)):
        return open_artifact(folder).file_bytes
    model_map = map_model(open_checkpoint(folder))
    return model_map.stored_numel * (dtype or model_map.dtype).itemsize


def free_memory(place: torch.device) -> int:
    """Bytes that are free on a device now."""
    if place.type == "cuda":
        return int(torch.cuda.mem_get_info(place)[0])
    return int(psutil.virtual_memory().available)


def _require_memory(needed: int, place: torch.device, folder: Path) -> None:
    free = free_memory(place)
    if needed > free:
        raise EnvironmentFault(
            f"the weights take {needed / 1e9:.1f} GB; {free / 1e9:.1f} GB are free on {place}",
            file=folder,
            remedy="free memory, or use --device cpu" if place.type == "cuda" else "free memory",
        )
