"""The `quantization_config` that an artifact adds to the model's config.json."""

from __future__ import annotations

from typing import Any

from ciuic_cli._version import __version__
from ciuic_cli.checkpoint.mtp import PredictionLayers

QUANT_METHOD = "ciuic"
"""Name of the format in transformers' registry of quantizers."""
FORMAT_VERSION = 3
"""Version of docs/FORMAT.md that is written; readers refuse later ones."""


def quantization_config(*, bits_per_weight: float, ratio: float, mtp: PredictionLayers) -> dict[str, Any]:
    """The `quantization_config` of an artifact.

    bits_per_weight, ratio: of all its safetensors bytes, for information. mtp: the key "mtp" is written if the
    checkpoint had multi-token-prediction layers.
    """
    return {
        "quant_method": QUANT_METHOD,
        "format_version": FORMAT_VERSION,
        "ciuic_version": __version__,
        "bits_per_weight": round(bits_per_weight, 6),
        "ratio": round(ratio, 6),
        **({"mtp": mtp.as_dict()} if mtp.layers else {}),
    }


def is_artifact(config: dict[str, Any]) -> bool:
    """Whether ciuic wrote this config.json."""
    section = config.get("quantization_config")
    return isinstance(section, dict) and section.get("quant_method") == QUANT_METHOD
