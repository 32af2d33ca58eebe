"""The numbers of a config.json: whether they are plausible, before transformers builds anything from them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from ciuic_cli.errors import InputError

# Limits of the numbers in a config.json, by what a key counts. They are chosen: far above any real model, and so low
# that a model at the limit is checked and built in little time and memory.
_MAX_LAYERS = 4096
_LAYER_KEYS = (
    "num_hidden_layers", "n_layer", "num_layers", "num_nextn_predict_layers", "first_k_dense_replace",
)  # fmt: skip
_MAX_EXPERTS = 65_536
"""Highest number of experts, and of labels."""
_EXPERT_COUNT_KEYS = ("n_routed_experts", "num_experts", "num_local_experts")
EXPERT_KEYS = (*_EXPERT_COUNT_KEYS, "n_shared_experts", "num_experts_per_tok")
_LABEL_KEYS = ("num_labels", "n_labels")
_MAX_POSITIONS = 1 << 32
_POSITION_KEYS = ("max_position_embeddings", "n_positions")
_MAX_LOOPS = 4096
_LOOP_WORDS = ("_iter", "loops")
"""Parts of keys that count iterations of a loop in the model's code."""
_MAX_WIDTH = 1 << 26
_WIDTH_WORDS = ("size", "dim", "heads", "rank", "vocab", "n_embd", "n_inner", "n_head", "mult")
"""Parts of keys that are dimensions of weights."""
_MAX_MAGNITUDE = 1 << 40
"""Highest absolute value of any integer. The largest integers in real models are rotary bases, about 5e10."""
_UNLIMITED_KEYS = ("model_max_length",)
"""Keys without that limit: transformers' tokenizers write 1e30 for "no limit"."""
_MAX_TOKEN = 2**31 - 1
"""Highest token id: the largest 32-bit integer."""
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
_POSITIVE_KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Keys that must be at least 1."""
_DTYPE_KEYS = ("dtype", "torch_dtype")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes in which transformers loads a model."""
IGNORED_KEYS = ("auto_map", "quantization_config", "transformers_version", "_name_or_path", "return_dict")
"""Keys that do not describe the architecture; they are neither checked nor passed on."""


def check_numbers(raw: dict[str, Any], file: Path | None) -> None:
    """Refuse integers, at any depth, that overflow later computations, and NaN and infinity outside lists.

    Lists may contain infinity: some models write open limits that way.
    """
    pending = [(key, value) for key, value in raw.items() if key not in (*IGNORED_KEYS, *_UNLIMITED_KEYS)]
    while pending:
        key, value = pending.pop()
        if isinstance(value, dict):
            pending += value.items()
        elif isinstance(value, list):
            pending += [(key, part) for part in value if not isinstance(part, float)]
        elif isinstance(value, int) and abs(value) > _MAX_MAGNITUDE:
            refuse_value(key, value, f"between -{_MAX_MAGNITUDE} and {_MAX_MAGNITUDE}", file)
        elif isinstance(value, float) and not math.isfinite(value):
            refuse_value(key, value, "a finite number", file)


def check_sizes(raw: dict[str, Any], kind: type[PretrainedConfig], file: Path | None) -> None:
    """Check sizes against limits, chosen by what each key counts. Loop keys count only if the class `kind` has them."""
    sections = [raw] + [
        value for key, value in raw.items() if key.endswith("_config") and isinstance(value, dict)
    ]
    for section in sections:
        require_token_ids(section, file)
        _check_dtype(section, file)
        for key, value in section.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                if key in _POSITIVE_KEYS and value is not None:
                    refuse_value(key, value, "a number", file)
                continue
            if key in _LAYER_KEYS:
                limit = _MAX_LAYERS
            elif key in EXPERT_KEYS or key in _LABEL_KEYS:
                limit = _MAX_EXPERTS
            elif key in _POSITION_KEYS:
                limit = _MAX_POSITIONS
            elif any(word in key for word in _LOOP_WORDS) and hasattr(kind, key):
                limit = _MAX_LOOPS
            elif any(word in key for word in (*_WIDTH_WORDS, "group")) and "token" not in key:
                limit = _MAX_WIDTH
            else:
                continue
            # With one position nothing can be predicted.
            minimum = 2 if key in _POSITION_KEYS else 1 if key in _POSITIVE_KEYS else 0
            if not minimum <= value <= limit:
                refuse_value(key, value, f"between {minimum} and {limit}", file)


def _check_dtype(section: dict[str, Any], file: Path | None) -> None:
    """Refuse a dtype in which transformers does not load a model. None is allowed: the weights decide."""
    for key in _DTYPE_KEYS:
        value = section.get(key)
        if value is not None and not (isinstance(value, str) and getattr(torch, value, None) in _DTYPES):
            raise InputError(
                f"config.json has {key} = {value!r:.60}, in which transformers loads no model",
                file=file,
                remedy=f"set {key} to bfloat16, float16 or float32, or download config.json again",
            )


def require_token_ids(values: dict[str, Any], file: Path | None = None) -> None:
    """Check the special token ids of a config.json or generation_config.json: they must fit a torch tensor.

    -1 is allowed: old configs write it for "none". Ids beyond the vocabulary are allowed: some models have them.
    Raises InputError, which names the key.
    """
    for key in _TOKEN_KEYS:
        value = values.get(key)
        for token in value if isinstance(value, list) else [value]:
            if token is not None and not (type(token) is int and -1 <= token <= _MAX_TOKEN):
                raise InputError(
                    f"{key} is {value!r:.60}, which must be null, a token id, or a list of token ids",
                    file=file,
                    remedy="correct it, or download the file again",
                )


def max_positions(config: PretrainedConfig) -> int | None:
    """Length in tokens of the longest text that the model supports; None if its config does not state it."""
    text = config.get_text_config()
    values = (getattr(text, key, None) for key in _POSITION_KEYS)
    return next((value for value in values if isinstance(value, int)), None)


def experts_per_token(config: PretrainedConfig) -> int:
    """Routed experts that each token passes; 1 if the config names no number, as without experts."""
    return getattr(config.get_text_config(), "num_experts_per_tok", None) or 1


def check_routing(config: PretrainedConfig, file: Path | None) -> None:
    """Check experts per token and expert groups against the experts: transformers would fail only in the forward."""
    text = config.get_text_config()
    experts = next(
        (getattr(text, key) for key in _EXPERT_COUNT_KEYS if isinstance(getattr(text, key, None), int)), None
    )
    per_token, groups = getattr(text, "num_experts_per_tok", None), getattr(text, "n_group", None)
    top_groups = getattr(text, "topk_group", None)
    if not experts:
        return
    if isinstance(per_token, int) and not 1 <= per_token <= experts:
        refuse_value(
            "num_experts_per_tok", per_token, f"between 1 and the number of experts, {experts}", file
        )
    if isinstance(groups, int) and (groups < 1 or experts % groups):
        refuse_value("n_group", groups, f"a divisor of the number of experts, {experts}", file)
    if isinstance(groups, int) and isinstance(top_groups, int) and not 1 <= top_groups <= groups:
        refuse_value("topk_group", top_groups, f"between 1 and n_group, {groups}", file)


def refuse_value(key: str, value: object, expected: str, file: Path | None) -> None:
    raise InputError(
        f"config.json has {key} = {value!r:.60}, which must be {expected}",
        file=file,
        remedy="download config.json again",
    )
