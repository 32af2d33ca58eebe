"""Models whose layers share more than the hidden state: every chunk has its own, also after an interruption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_table import TEXT
from tiny_families import make_family

from ciuic_cli.checkpoint.model_map import map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.compression.pipeline import compress
from ciuic_cli.layerwise.layer_stream import LayerStream
from ciuic_cli.process.progress import no_progress


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

        carries.clear()
        with pytest.raises(KeyboardInterrupt):
            run(out, progress=interrupt)
        assert carries and all(carries), "every collection must have found shared state"
    carries.clear()
    assert run(out) == whole
    assert carries and all(carries), "every collection must have found shared state"


@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text", "glm_moe_dsa"])
@torch.no_grad()
def test_every_chunk_has_the_shared_state_of_its_own(family: str, tmp_path: Path) -> None:
    model_map = map_model(open_checkpoint(make_family(family, tmp_path / "model")))
    ids = torch.randint(3, 263, (3, 24), generator=torch.Generator().manual_seed(0))
    chunks = list(ids.split(1))
    stream = LayerStream(
        model_map, chunks, tmp_path / "stream", device=torch.device("cpu"), dtype=torch.float32
    )
    stream.forward(no_progress)
    whole = model_map.skeleton(dtype=torch.float32, experts_implementation="eager")
    model_map.materialise(whole, "", torch.float32)
    expected = whole(ids, use_cache=False).logits
    with stream.tail_logits() as logits_of:
        found = torch.cat([torch.cat([logits for _, _, logits in logits_of(i)], 1) for i in range(3)])
    assert float((found - expected).abs().max()) < 1e-3 * float(expected.std())
