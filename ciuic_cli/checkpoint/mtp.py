"""Multi-token-prediction layers: which tensors of a checkpoint are theirs, and what an artifact says of them.

They draft tokens ahead for speculative decoding. DeepSeek-V3 ships one as layer `num_hidden_layers`, V4 as
`mtp.0`; transformers' model has no parameters for them, and its own predictions do not pass through them.
`keeping` makes parameters of them for `compress --mtp keep`; otherwise they are left out, and that is said.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ciuic_cli.errors import InputError

COUNT_KEY = "num_nextn_predict_layers"
"""In config.json: how many such layers there are. vLLM and SGLang rely on it and look for their weights."""
_LAYER = re.compile(r"^(.*?\blayers\.)(\d{1,9})\.")
_MARKS = frozenset({"eh_proj", "enorm", "hnorm"})
"""What such a layer has, under a decoder layer's number, that a decoder layer has not."""
_MTP = re.compile(r"^((?:.*\.)?mtp\.(?:layers\.)?(?:\d+\.)?)")


@dataclass(frozen=True)
class PredictionLayer:
    """One layer: the prefix of its names ("model.layers.61"), and its tensors and bytes in the original's files."""

    name: str
    tensors: int
    nbytes: int


@dataclass(frozen=True)
class PredictionLayers:
    """All of a checkpoint's, `kept` or left out.

    stored: tensors that the artifact has of them; shared: those that equal one of the model's own value for
    value, and the name under which both are stored.
    """

    layers: tuple[PredictionLayer, ...] = ()
    kept: bool = False
    stored: int = 0
    shared: dict[str, str] = field(default_factory=dict)

    def sentences(self) -> list[str]:
        """One for each layer, and one for each shared tensor."""
        fate = "kept" if self.kept else "dropped"
        return [
            f"multi-token-prediction layer {layer.name}: "
            f"{layer.tensors} tensors, {layer.nbytes} bytes in the original, {fate}"
            for layer in self.layers
        ] + [f"{name} equals {source}: stored once" for name, source in self.shared.items()]

    def owns(self, name: str) -> bool:
        """Whether a tensor of this name belongs to one of the layers."""
        return any(name.startswith(f"{layer.name}.") for layer in self.layers)

    def as_dict(self) -> dict[str, Any]:
        """The "mtp" of reports and of an artifact's `quantization_config`."""
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
        """What `as_dict` made; None (an artifact that says nothing) is no layers. Raises InputError for others."""
        if section is None:
            return cls()
        try:
            return cls(*_checked(section))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"the section mtp of quantization_config is not in its form: {type(error).__name__}",
                file=file,
                remedy="the artifact is damaged; fetch or compress it again",
            ) from error


def _checked(section: Any) -> tuple[tuple[PredictionLayer, ...], bool, int, dict[str, str]]:
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


def layer_of(name: str, layers: int) -> str | None:
    """The layer that a tensor belongs to if it is none of the model's own `layers`; None for all others.

    It is a prediction layer if `predicts` says so of its tensors' names.
    """
    match = _LAYER.match(name)
    if match is not None and int(match[2]) >= layers and "mtp" not in match[1]:
        return f"{match[1]}{match[2]}"
    match = _MTP.match(name)
    return match[1].rstrip(".") if match is not None else None


def predicts(names: Iterable[str]) -> bool:
    """Whether these tensors, all of one layer by `layer_of`, are a prediction layer's."""
    return any(_MTP.match(name) or _MARKS & set(name.split(".")) for name in names)


def uncounted(places: Iterable[str], tensors: Iterable[str], layers: int) -> str | None:
    """The first of `places` that has all that one of the model's own `layers` has; None if there is none.

    places: layers by `layer_of` that do not predict. tensors: all names of the checkpoint.
    """
    inside: dict[tuple[str, str], set[str]] = defaultdict(set)
    for name in tensors:
        match = _LAYER.match(name)
        if match is not None:
            inside[match[1], match[2]].add(name[match.end() :])
    usual: dict[str, set[frozenset[str]]] = defaultdict(set)
    for (base, number), names in inside.items():
        if int(number) < layers:
            usual[base].add(frozenset(names))
    for place in places:
        stack, _, number = place.rpartition(".")
        base = f"{stack}."
        if any(names <= inside[base, number] for names in usual[base]):
            return place
    return None
