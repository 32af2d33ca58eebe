"""Models whose layers share more than the hidden state: a stopped run computes it again and ends in the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from family_table import TEXT
from tiny_families import make_family

from ciuic_cli.compression.pipeline import compress
from ciuic_cli.layerwise.layer_stream import LayerStream


@pytest.mark.parametrize("family", ["gemma3n_text", "glm_moe_dsa"])
def test_shared_state_survives_an_interruption(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, text = make_family(family, tmp_path / "model"), tmp_path / "text.txt"
    text.write_text(TEXT)

    def run(out: Path, **more: Any) -> bytes:
        compress(
            source, out, ratio=2.0, effort="fast", nsamples=6, seqlen=48, calibration=[text],
            calibration_only=True, prune="off", rank="off", bits=[4], **more,
        )  # fmt: skip
        return (out / "model.safetensors").read_bytes()

    whole = run(tmp_path / "whole")
    carries: list[bool] = []
    original = LayerStream.carries_state

    def recorded(stream: LayerStream) -> bool:
        carries.append(original.fget(stream))  # type: ignore[attr-defined]
        return carries[-1]

    monkeypatch.setattr(LayerStream, "carries_state", property(recorded))
    out = tmp_path / "stopped"
    for stop in (("forward", 2), ("backward", 1), ("backward", 3)):

        def interrupt(what: str, done: int, total: int, stop: tuple[str, int] = stop) -> None:
            if (what, done) == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(out, progress=interrupt)
    assert run(out) == whole
    assert carries == [True] * 3, "every continued collection must have found shared state"
