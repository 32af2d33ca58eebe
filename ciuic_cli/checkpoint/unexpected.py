"""Tensors of a checkpoint that make no parameter of the model: said, never skipped in silence.

DeepSeek-V3 ships its multi-token-prediction layer as layer `num_hidden_layers`, V4 as `mtp.*`; transformers
does not build it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from transformers import PretrainedConfig

from ciuic_cli.checkpoint.reader import Checkpoint

_LAYER = re.compile(r"^(.*?\blayers\.)(\d+)\.")
_MTP = re.compile(r"^((?:.*\.)?mtp\.(?:layers\.)?(?:\d+\.)?)")
_DERIVED = re.compile(r"rotary_emb\.inv_freq$|(^|\.)position_ids$")
_UNUSED_SCALE = re.compile(r"\.(input_scale|input_scale_inv|activation_scale|k_scale|v_scale)$")


def sort_unexpected(
    names: Iterable[str], config: PretrainedConfig, checkpoint: Checkpoint
) -> tuple[list[str], list[str], list[str]]:
    """Sort into warnings, a line per dropped multi-token-prediction layer, and those layers' tensors."""
    layers = config.get_text_config().num_hidden_layers
    dropped: dict[str, list[str]] = defaultdict(list)
    others: list[str] = []
    for name in names:
        place = _mtp_layer(name, layers)
        if place is not None:
            dropped[place].append(name)
            if name in checkpoint.scales:
                dropped[place].append(checkpoint.scales[name])
        elif not (_DERIVED.search(name) or _UNUSED_SCALE.search(name)):
            others.append(name)
    warnings = []
    if others:
        more = ", ..." if len(others) > 3 else ""
        warnings.append(
            f"{len(others)} tensor(s) of the checkpoint are not part of the model and are left out: "
            f"{', '.join(others[:3])}{more}"
        )
    lines = []
    for place, tensors in dropped.items():
        nbytes = sum(checkpoint.tensors[tensor].nbytes for tensor in tensors)
        lines.append(f"multi-token-prediction layer {place}: {len(tensors)} tensors, {nbytes} bytes, dropped")
    return warnings, lines, [tensor for tensors in dropped.values() for tensor in tensors]


def _mtp_layer(name: str, layers: int) -> str | None:
    match = _LAYER.match(name)
    if match is not None and int(match[2]) >= layers and "mtp" not in match[1]:
        return f"{match[1]}{match[2]}"
    match = _MTP.match(name)
    return match[1].rstrip(".") if match is not None else None
