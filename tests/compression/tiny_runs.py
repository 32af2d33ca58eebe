"""Compression of a tiny checkpoint in a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ciuic_cli.compression import pipeline
from ciuic_cli.report.schema import MemoryReport

TEXT = "The quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs. " * 60


def compress_tiny(source: Path, out: Path, text: Path, **options: Any) -> MemoryReport:
    settings: dict[str, Any] = {
        "effort": "fast",
        "nsamples": 6,
        "seqlen": 48,
        "calibration": [text],
        "calibration_only": True,
        "ratio": None if {"target_bpw", "target_size"} & options.keys() else 2.0,
    }
    return pipeline.compress(source, out, **{**settings, **options})


def weights_of(out: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(out.glob("*.safetensors")))
