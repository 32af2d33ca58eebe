"""Tensors of a checkpoint that make no parameter of the model: said, never skipped in silence."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from transformers import PretrainedConfig

from ciuic_cli.checkpoint.mtp import PredictionLayer, PredictionLayers, layer_of, predicts, uncounted
from ciuic_cli.checkpoint.reader import Checkpoint
from ciuic_cli.errors import InputError

_DERIVED = re.compile(r"rotary_emb\.inv_freq$|(^|\.)position_ids$")
_UNUSED_SCALE = re.compile(r"\.(input_scale|input_scale_inv|activation_scale|k_scale|v_scale)$")


def sort_unexpected(
    names: Iterable[str], config: PretrainedConfig, checkpoint: Checkpoint
) -> tuple[list[str], PredictionLayers, list[str]]:
    """Sort into warnings, multi-token-prediction layers, and those layers' tensors that hold numbers.

    Scales are not among these: they belong to their weights. Raises InputError for a whole decoder layer that
    config.json does not count: the model would end before it.
    """
    layers = config.get_text_config().num_hidden_layers
    by_place: dict[str | None, list[str]] = defaultdict(list)
    for name in names:
        by_place[layer_of(name, layers)].append(name)
    others = by_place.pop(None, [])
    beyond = {str(place): found for place, found in by_place.items()}
    predicting = {place: found for place, found in beyond.items() if predicts(found)}
    beyond = {place: found for place, found in beyond.items() if place not in predicting}
    _require_counted(beyond, layers, checkpoint)
    others += [name for found in beyond.values() for name in found]
    others = [name for name in others if not _is_useless(name)]
    warnings = []
    if others:
        more = ", ..." if len(others) > 3 else ""
        warnings.append(
            f"{len(others)} tensor(s) of the checkpoint are not part of the model and are left out: "
            f"{', '.join(others[:3])}{more}"
        )
    found = PredictionLayers(
        tuple(_prediction_layer(place, of_layer, checkpoint) for place, of_layer in predicting.items())
    )
    return warnings, found, [name for found in predicting.values() for name in found if not _is_useless(name)]


def _is_useless(name: str) -> bool:
    return bool(_DERIVED.search(name) or _UNUSED_SCALE.search(name))


def _prediction_layer(place: str, names: list[str], checkpoint: Checkpoint) -> PredictionLayer:
    stored = [*names, *(checkpoint.scales[name] for name in names if name in checkpoint.scales)]
    return PredictionLayer(place, len(stored), sum(checkpoint.tensors[name].nbytes for name in stored))


def _require_counted(beyond: dict[str, list[str]], layers: int, checkpoint: Checkpoint) -> None:
    place = uncounted(beyond, checkpoint.tensors, layers) if beyond else None
    if place is not None:
        raise InputError(
            f"{place} is a decoder layer as the others are, but the config counts {layers}",
            file=checkpoint.folder / "config.json",
            tensor=beyond[place][0],
            remedy="set num_hidden_layers to what the weights have, or download config.json again",
        )
