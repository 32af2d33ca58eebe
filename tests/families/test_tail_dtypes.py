"""Embedding and head after the last layer: in the dtype of products, without another bit in the logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import make_family

from ciuic_cli.checkpoint.model_map import ModelMap, map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.layerwise.layer_stream import LayerStream
from ciuic_cli.process.progress import no_progress


def _logits(checkpoint: Path, folder: Path) -> tuple[torch.Tensor, set[torch.dtype]]:
    """Logits of two sequences, and the dtypes of embedding and head while they are computed."""
    ids = torch.randint(3, 263, (2, 24), generator=torch.Generator().manual_seed(0))
    stream = LayerStream(
        map_model(open_checkpoint(checkpoint)), [ids], folder,
        device=torch.device("cpu"), dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.no_grad():
        stream.forward(no_progress)
        with stream.tail_logits() as logits_of_chunk:
            modules = stream.model.get_input_embeddings(), stream.model.get_output_embeddings()
            dtypes = {module.weight.dtype for module in modules}
            return torch.cat([logits for _, _, logits in logits_of_chunk(0)], 1), dtypes


# Gemma 3n computes in the dtype of the embedding after the layers; GPT-2 and OPT also have an embedding of positions.
@pytest.mark.parametrize("family", ["llama", "gemma3n_text", "gpt2", "opt"])
def test_embedding_and_head_in_bfloat16_change_no_bit(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_family(family, tmp_path / "model")
    found, dtypes = _logits(checkpoint, tmp_path / "bfloat16")
    assert dtypes == {torch.bfloat16}
    materialise = ModelMap.materialise

    def in_float32(model_map: ModelMap, module: Any, prefix: str, *args: Any, **options: Any) -> None:
        more = {} if prefix else {"weight_dtypes": None}
        materialise(model_map, module, prefix, *args, **options | more)

    monkeypatch.setattr(ModelMap, "materialise", in_float32)
    expected, dtypes = _logits(checkpoint, tmp_path / "float32")
    assert dtypes == {torch.float32}
    assert torch.equal(found, expected)
