"""The dtype in which a checkpoint's model is loaded."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from ciuic_cli.checkpoint.formats import TORCH_DTYPES
from ciuic_cli.checkpoint.reader import Checkpoint

MODEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes in which transformers can build a model."""


def model_dtype(config: PretrainedConfig, checkpoint: Checkpoint) -> torch.dtype:
    """The config's dtype, else the first stored one that the model can have, else bfloat16 (FP8 or FP4 only)."""
    dtype = config.dtype
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), None)
    if dtype in MODEL_DTYPES:
        return dtype
    for entry in checkpoint.tensors.values():
        stored = TORCH_DTYPES.get(entry.dtype)
        if stored in MODEL_DTYPES and entry.name not in checkpoint.scales.values():
            return stored
    return torch.bfloat16
