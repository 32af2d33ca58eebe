"""Tensors without a place in transformers' model, above all multi-token-prediction (MTP) layers.

MTP layers draft tokens ahead for speculative decoding. DeepSeek-V3 ships one as layer `num_hidden_layers`, V4 as
`mtp.0`. transformers' model has no parameters for them, and its predictions do not depend on them.

`sort_unexpected` takes the names that match no parameter and returns warnings and the MTP layers among them.
`PredictionLayers` records these layers in reports and artifacts. For `compress --mtp keep`, `mtp_parameters.keep_mtp`
turns their tensors into parameters; otherwise they are dropped, and the report says so.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ciuic_cli.errors import InputError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from ciuic_cli.checkpoint.reader import Checkpoint

COUNT_KEY = "num_nextn_predict_layers"
"""Key of config.json with the number of MTP layers. vLLM and SGLang read it and expect the layers' weights."""
_NUMBERED_LAYER = re.compile(r"^(.*?\blayers\.)(\d{1,9})\.")
_MTP_ONLY = frozenset({"eh_proj", "enorm", "hnorm"})
"""Names of modules that only MTP layers have; such a layer may be numbered like a decoder layer."""
_MTP_PREFIX = re.compile(r"^((?:.*\.)?mtp\.(?:layers\.)?(?:\d+\.)?)")
_DERIVED = re.compile(r"rotary_emb\.inv_freq$|(^|\.)position_ids$")
"""Names of buffers that transformers computes itself."""
_UNUSED_SCALE = re.compile(r"\.(input_scale|input_scale_inv|activation_scale|k_scale|v_scale)$")
"""Names of activation scales. Weights do not need them."""


@dataclass(frozen=True)
class PredictionLayer:
    """One MTP layer: the prefix of its names ("model.layers.61"), and the number and bytes of its stored tensors."""

    name: str
    tensors: int
    nbytes: int


@dataclass(frozen=True)
class PredictionLayers:
    """All MTP layers of a checkpoint, and whether the artifact keeps them.

    Attributes:
        stored: number of tensors of these layers in the artifact.
        shared: tensor -> the model's parameter with equal values, under whose name both are stored.
    """

    layers: tuple[PredictionLayer, ...] = ()
    kept: bool = False
    stored: int = 0
    shared: dict[str, str] = field(default_factory=dict)

    def sentences(self) -> list[str]:
        """One sentence for the user per layer, then one per shared tensor."""
        fate = "kept" if self.kept else "dropped"
        return [
            f"multi-token-prediction layer {layer.name}: "
            f"{layer.tensors} tensors, {layer.nbytes} bytes in the original, {fate}"
            for layer in self.layers
        ] + [f"{name} equals {source}: stored once" for name, source in self.shared.items()]

    def owns(self, name: str) -> bool:
        """Whether the tensor belongs to one of the layers."""
        return any(name.startswith(f"{layer.name}.") for layer in self.layers)

    def as_dict(self) -> dict[str, Any]:
        """The section "mtp" of reports and of an artifact's `quantization_config`."""
        return {
            "kept": self.kept,
            "layers": [
                {"name": layer.name, "tensors": layer.tensors, "bytes": layer.nbytes} for layer in self.layers
            ],
            "stored_tensors": self.stored,
            "shared": dict(self.shared),
        }

    @classmethod
    def from_dict(cls, section: object, file: Path | None = None) -> PredictionLayers:
        """The inverse of `as_dict`. None (an artifact without the section) gives no layers.

        Raises InputError, naming `file`, if the section has another form.
        """
        if section is None:
            return cls()
        try:
            return cls(*_checked_section(section))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"the section mtp of quantization_config is malformed: {type(error).__name__}",
                file=file,
                remedy="the artifact is damaged; fetch or compress it again",
            ) from error


def _checked_section(section: Any) -> tuple[tuple[PredictionLayer, ...], bool, int, dict[str, str]]:
    layers = tuple(
        PredictionLayer(layer["name"], layer["tensors"], layer["bytes"]) for layer in section["layers"]
    )
    kept, stored, shared = section["kept"], section["stored_tensors"], dict(section["shared"])
    counts = [stored, *(layer.tensors for layer in layers), *(layer.nbytes for layer in layers)]
    names = [*shared.keys(), *shared.values(), *(layer.name for layer in layers)]
    if (
        not isinstance(kept, bool)
        or not all(type(count) is int and count >= 0 for count in counts)
        or not all(isinstance(name, str) and name for name in names)
    ):
        raise TypeError
    return layers, kept, stored, shared


def sort_unexpected(
    names: Iterable[str], config: PretrainedConfig, checkpoint: Checkpoint
) -> tuple[list[str], PredictionLayers, list[str]]:
    """Sort the tensors `names`, which match no parameter of the model.

    Returns warnings for the user, the MTP layers, and the names of their tensors without scales and derived buffers.
    Raises InputError for a complete decoder layer beyond `num_hidden_layers`: the model would lack its last layer.
    """
    layers = config.get_text_config().num_hidden_layers
    by_prefix: dict[str | None, list[str]] = defaultdict(list)
    for name in names:
        by_prefix[extra_layer_of(name, layers)].append(name)
    others = by_prefix.pop(None, [])
    extra_layers = {str(prefix): of_layer for prefix, of_layer in by_prefix.items()}
    predicting = {prefix: of_layer for prefix, of_layer in extra_layers.items() if _is_mtp_layer(of_layer)}
    extra_layers = {prefix: of_layer for prefix, of_layer in extra_layers.items() if prefix not in predicting}
    _require_counted(extra_layers, layers, checkpoint)
    others += [name for of_layer in extra_layers.values() for name in of_layer]
    others = [name for name in others if not _is_useless(name)]
    warnings = []
    if others:
        more = ", ..." if len(others) > 3 else ""
        warnings.append(
            f"{len(others)} tensor(s) of the checkpoint are not part of the model and are dropped: "
            f"{', '.join(others[:3])}{more}"
        )
    mtp = PredictionLayers(
        tuple(_prediction_layer(prefix, of_layer, checkpoint) for prefix, of_layer in predicting.items())
    )
    tensors = [name for of_layer in predicting.values() for name in of_layer if not _is_useless(name)]
    return warnings, mtp, tensors


def extra_layer_of(name: str, layers: int) -> str | None:
    """The prefix of the tensor's layer if that is an MTP layer or numbered beyond the model's `layers`; else None."""
    match = _NUMBERED_LAYER.match(name)
    if match is not None and int(match[2]) >= layers and "mtp" not in match[1]:
        return f"{match[1]}{match[2]}"
    match = _MTP_PREFIX.match(name)
    return match[1].rstrip(".") if match is not None else None


def _is_mtp_layer(names: Iterable[str]) -> bool:
    """Whether a layer with these tensors, all of one prefix of `extra_layer_of`, is an MTP layer."""
    return any(_MTP_PREFIX.match(name) or _MTP_ONLY & set(name.split(".")) for name in names)


def _is_useless(name: str) -> bool:
    return bool(_DERIVED.search(name) or _UNUSED_SCALE.search(name))


def _prediction_layer(prefix: str, names: list[str], checkpoint: Checkpoint) -> PredictionLayer:
    stored = [*names, *(checkpoint.scales[name] for name in names if name in checkpoint.scales)]
    return PredictionLayer(prefix, len(stored), sum(checkpoint.tensors[name].nbytes for name in stored))


def _require_counted(extra_layers: dict[str, list[str]], layers: int, checkpoint: Checkpoint) -> None:
    """Raise InputError if one of `extra_layers` has all the tensors of one of the model's own layers."""
    prefix = _complete_layer(extra_layers, checkpoint.tensors, layers) if extra_layers else None
    if prefix is not None:
        raise InputError(
            f"{prefix} is a complete decoder layer, but config.json counts only {layers} layers",
            file=checkpoint.folder / "config.json",
            tensor=extra_layers[prefix][0],
            remedy="set num_hidden_layers to what the weights have, or download config.json again",
        )


def _complete_layer(prefixes: Iterable[str], tensors: Iterable[str], layers: int) -> str | None:
    """The first of `prefixes` whose layer has all the tensors of one of the model's own `layers`; else None.

    tensors: all names of the checkpoint.
    """
    suffixes: dict[tuple[str, str], set[str]] = defaultdict(set)
    for name in tensors:
        match = _NUMBERED_LAYER.match(name)
        if match is not None:
            suffixes[match[1], match[2]].add(name[match.end() :])
    own_layers: dict[str, set[frozenset[str]]] = defaultdict(set)
    for (base, number), of_layer in suffixes.items():
        if int(number) < layers:
            own_layers[base].add(frozenset(of_layer))
    for prefix in prefixes:
        stack, _, number = prefix.rpartition(".")
        base = f"{stack}."
        if any(of_layer <= suffixes[base, number] for of_layer in own_layers[base]):
            return prefix
    return None
