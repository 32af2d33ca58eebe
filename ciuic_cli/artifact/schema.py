"""The artifact's own fields in config.json."""

from __future__ import annotations

from typing import Any

from ciuic_cli._version import __version__
from ciuic_cli.checkpoint.mtp import PredictionLayers

QUANT_METHOD = "ciuic"
FORMAT_VERSION = 3


def quantization_config(report: dict[str, Any], mtp: PredictionLayers) -> dict[str, Any]:
    """The `quantization_config` of an artifact: how to read it, and what it promises.

    "mtp" is there where the checkpoint had multi-token-prediction layers.
    """
    return {
        "quant_method": QUANT_METHOD,
        "format_version": FORMAT_VERSION,
        "ciuic_version": __version__,
        "bits_per_weight": round(report["bits_per_weight"], 6),
        "ratio": round(report["ratio"], 6),
        **({"mtp": mtp.as_dict()} if mtp.layers else {}),
    }


def is_artifact(config: dict[str, Any]) -> bool:
    """Whether a config.json is one that ciuic wrote."""
    section = config.get("quantization_config")
    return isinstance(section, dict) and section.get("quant_method") == QUANT_METHOD
