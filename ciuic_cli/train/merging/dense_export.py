"""Writes a checkpoint's weights as a dense bfloat16 checkpoint, under the names that files on the hub have.

The layout follows from transformers' conversion rules, applied to shapes. Then one tensor, or one expert's, is read,
rounded and written at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from ciuic_cli.artifact import writer
from ciuic_cli.artifact.layout import StoredTensor, lay_out
from ciuic_cli.checkpoint.model_map import ModelMap, map_model
from ciuic_cli.checkpoint.naming import Assembly, map_names
from ciuic_cli.checkpoint.reader import Checkpoint
from ciuic_cli.process.progress import Progress, no_progress

DTYPE, DTYPE_NAME = torch.bfloat16, "BF16"
"""Dtype of all floating tensors, but those that transformers keeps in float32, and its name in safetensors."""
_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}


def write_dense(checkpoint: Checkpoint, folder: Path, progress: Progress = no_progress) -> int:
    """Write `checkpoint` into `folder` with its tokenizer files; returns the bytes of the safetensors files.

    Memory holds one tensor at a time; of a stack of experts, one expert, if transformers stacks experts' tensors.

    Raises:
        InputError: the checkpoint cannot be mapped onto transformers' model of it.
    """
    model_map = map_model(checkpoint)
    parts = _parts(model_map)
    stored = [
        StoredTensor(name, _NAMES[dtype], shape, torch.Size(shape).numel() * dtype.itemsize)
        for name, (shape, dtype, _) in parts.items()
    ]
    shards = lay_out(stored)
    total, done = sum(shard.nbytes for shard in shards), 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress("writing", done, total)

    def payload(name: str) -> bytes:
        _, dtype, read = parts[name]
        value = read().to(dtype).contiguous()
        return bytes(value.reshape(-1).view(torch.uint8).numpy().tobytes())

    writer.write_shards(shards, folder, payload, count)
    writer.write_index(shards, folder)
    config = {**model_map.source_config, "dtype": str(DTYPE).removeprefix("torch.")}
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    writer.copy_companions(checkpoint.folder, folder)
    return total


Part = tuple[tuple[int, ...], torch.dtype, Callable[[], torch.Tensor]]
"""Shape and dtype of a stored tensor, and a function that reads it."""


def _parts(model_map: ModelMap) -> dict[str, Part]:
    """Name in the file -> part."""
    model: Any = model_map.meta_model()
    fixed = model_map.dtype_rules.get(DTYPE, {})
    parts: dict[str, Part] = {}
    for name, parameter in model_map.parameters.items():
        if parameter.tied_to is not None:
            continue
        dtype = fixed.get(name, DTYPE)
        if parameter.buffer and name not in fixed:
            dtype = model_map.stored_dtype(name)
        shape = parameter.in_memory(torch.empty(parameter.shape, device="meta")).shape
        value = torch.empty(shape, dtype=dtype, device="meta")
        reverted = {
            key: tuple(one.shape) for key, one in revert_weight_conversion(model, {name: value}).items()
        }
        assembly = map_names(model, reverted).assemblies.get(name)
        for key, stored_shape in reverted.items():
            parts[key] = (stored_shape, dtype, _reader(model_map, model, name, key, assembly))
    return parts


def _reader(
    model_map: ModelMap, model: Any, name: str, key: str, assembly: Assembly | None
) -> Callable[[], torch.Tensor]:
    parameter = model_map.parameters[name]
    if assembly is not None and assembly.stacks_experts:
        count = parameter.shape[0]
        expert = next(e for e in range(count) if key in assembly.expert_sources(e))
        sources = assembly.expert_sources(expert)
        rows = parameter.shape[1] // len(sources)
        begin = sources.index(key) * rows
        return lambda: parameter.in_memory(model_map.read_expert(name, expert))[begin : begin + rows]

    def whole() -> torch.Tensor:
        value = parameter.in_memory(model_map.read(name))
        found: torch.Tensor = revert_weight_conversion(model, {name: value})[key]
        return found

    return whole
