"""Tensors of a checkpoint that make no parameter of the model: said, never skipped in silence."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from transformers import PretrainedConfig

from ciuic_cli.checkpoint.mtp import PredictionLayer, PredictionLayers, layer_of
from ciuic_cli.checkpoint.reader import Checkpoint

_DERIVED = re.compile(r"rotary_emb\.inv_freq$|(^|\.)position_ids$")
_UNUSED_SCALE = re.compile(r"\.(input_scale|input_scale_inv|activation_scale|k_scale|v_scale)$")


def sort_unexpected(
    names: Iterable[str], config: PretrainedConfig, checkpoint: Checkpoint
) -> tuple[list[str], PredictionLayers, list[str]]:
    """Sort into warnings, multi-token-prediction layers, and those layers' tensors that hold numbers.

    Scales are not among these: they belong to their weights.
    """
    layers = config.get_text_config().num_hidden_layers
    predicting: dict[str, list[str]] = defaultdict(list)
    tensors: list[str] = []
    others: list[str] = []
    for name in names:
        place = layer_of(name, layers)
        useless = _DERIVED.search(name) or _UNUSED_SCALE.search(name)
        if place is not None:
            predicting[place].append(name)
            if name in checkpoint.scales:
                predicting[place].append(checkpoint.scales[name])
            if not useless:
                tensors.append(name)
        elif not useless:
            others.append(name)
    warnings = []
    if others:
        more = ", ..." if len(others) > 3 else ""
        warnings.append(
            f"{len(others)} tensor(s) of the checkpoint are not part of the model and are left out: "
            f"{', '.join(others[:3])}{more}"
        )
    found = PredictionLayers(
        tuple(
            PredictionLayer(place, len(of_layer), sum(checkpoint.tensors[name].nbytes for name in of_layer))
            for place, of_layer in predicting.items()
        )
    )
    return warnings, found, tensors
