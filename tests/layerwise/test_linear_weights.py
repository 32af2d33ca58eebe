"""Weights of a layer's linears while the layer runs: in the dtype of products, without another bit in the results."""

from __future__ import annotations

from collections.abc import Callable
from functools import partialmethod
from pathlib import Path

import pytest
import torch

from ciuic_cli.checkpoint.model_map import ModelMap, map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.layerwise.layer_stream import LayerStream
from ciuic_cli.layerwise.operations.mixed_precision import mixed_precision

CPU = torch.device("cpu")


def _hidden_and_gradient(checkpoint: Path, folder: Path) -> tuple[list[torch.Tensor], set[torch.dtype]]:
    """Output of layer 0 and the gradient at its input, and the dtypes of its weights."""
    torch.manual_seed(0)
    stream = LayerStream(
        map_model(open_checkpoint(checkpoint)), [torch.arange(48).reshape(2, 24)], folder,
        device=CPU, dtype=torch.bfloat16,
    )  # fmt: skip
    with mixed_precision(CPU, torch.bfloat16):
        stream.begin()
    stream.forward_layer(0)
    output = stream.hidden.get("1.0", CPU)
    stream.gradient.put("1.0", torch.randn_like(output))
    with stream.backward_layer(0) as (layer, run_chunks):
        dtypes = {weight.dtype for weight in layer.parameters()}
        run_chunks([0])
    return [output, stream.gradient.get("0.0", CPU)], dtypes


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_linears_in_bfloat16_change_no_bit(
    kind: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tiny_checkpoint(kind)
    found, dtypes = _hidden_and_gradient(checkpoint, tmp_path / "bfloat16")
    assert dtypes == {torch.bfloat16, torch.float32}
    materialise = partialmethod(_without_weight_dtypes, ModelMap.materialise)
    monkeypatch.setattr(ModelMap, "materialise", materialise)
    expected, dtypes = _hidden_and_gradient(checkpoint, tmp_path / "float32")
    assert dtypes == {torch.float32}
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def _without_weight_dtypes(
    model_map: ModelMap, materialise: Callable[..., None], *args: object, **options: object
) -> None:
    materialise(model_map, *args, **{**options, "weight_dtypes": None})
