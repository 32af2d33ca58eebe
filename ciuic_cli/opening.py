"""Open any model that can be measured: an artifact, a dense checkpoint, or one in FP8 or FP4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import torch

from ciuic_cli.artifact.reader import open_artifact
from ciuic_cli.checkpoint.folder import locate, read_config
from ciuic_cli.checkpoint.model_map import ModelMap, map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.errors import EnvironmentFault, InputError
from ciuic_cli.inspection import is_artifact
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
        return load(folder, device=place, dtype=dtype).eval()
    checkpoint = open_checkpoint(folder)
    model_map = map_model(checkpoint)
    _require_memory(model_map.stored_numel * (dtype or model_map.dtype).itemsize, place, folder)
    if checkpoint.scales or checkpoint.config.get("quantization_config"):
        return _decoded(model_map, place, dtype)  # also where a bf16 copy kept the config of the FP8 one
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype or "auto", trust_remote_code=False, use_safetensors=True
    )
    return model.eval().to(place)


def open_tokenizer(path: str | Path) -> Any:
    """The tokenizer in a model's folder; raises InputError if it cannot be loaded."""
    from transformers import AutoTokenizer

    folder = locate(path)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise whatever a damaged file makes them raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"the tokenizer cannot be loaded: {reason}",
            file=folder,
            remedy="copy tokenizer.json and tokenizer_config.json of the original there",
        ) from error


def file_bytes(path: str | Path) -> int:
    """Bytes of all safetensors files of an artifact or a checkpoint."""
    folder = locate(path)
    if is_artifact(read_config(folder)):
        return open_artifact(folder).file_bytes
    return open_checkpoint(folder).source_bytes


def expected_bytes(path: str | Path, dtype: torch.dtype) -> int:
    """Bytes that the model's weights will take in memory, from the headers; dense ones in `dtype`."""
    folder = locate(path)
    if is_artifact(read_config(folder)):
        return open_artifact(folder).file_bytes
    return map_model(open_checkpoint(folder)).stored_numel * dtype.itemsize


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


def _decoded(model_map: ModelMap, place: torch.device, dtype: torch.dtype | None) -> Any:
    """The model with its weights decoded tensor by tensor; transformers has no CPU path for FP8."""
    from transformers import GenerationConfig

    model = model_map.skeleton(dtype=dtype)
    model_map.materialise(model, "", dtype, place)
    if (model_map.checkpoint.folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(model_map.checkpoint.folder)
    return model.eval()
