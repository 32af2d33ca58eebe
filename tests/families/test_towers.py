"""Language models with a vision tower: the language model is compressed, the tower keeps its dtype and its bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_table import TEXT, compare
from safetensors.torch import load_file
from tiny_families import make_family

from ciuic_cli import read_tensor
from ciuic_cli.artifact.reader import open_artifact
from ciuic_cli.compression.pipeline import compress
from ciuic_cli.errors import TargetError

IMAGE_TOKEN = 260
"""`image_token_id` of the tiny models."""


def _pixels(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


IMAGES: dict[str, tuple[int, dict[str, torch.Tensor]]] = {
    "gemma3": (4, {"pixel_values": _pixels(1, 3, 16, 16)}),
    "mistral3": (4, {"pixel_values": _pixels(1, 3, 16, 16), "image_sizes": torch.tensor([[16, 16]])}),
    "qwen2_vl": (4, {"pixel_values": _pixels(16, 96), "image_grid_thw": torch.tensor([[1, 4, 4]])}),
    "qwen2_5_vl": (4, {"pixel_values": _pixels(16, 96), "image_grid_thw": torch.tensor([[1, 4, 4]])}),
    "deepseek_vl": (16, {"pixel_values": _pixels(1, 3, 16, 16)}),
}
"""By model type: the tokens of an image of 16 x 16 pixels, and what the model's processor makes of it."""


def _compressed(family: str, folder: Path, **options: Any) -> tuple[Path, Path, Any]:
    source, text, out = make_family(family, folder / "model"), folder / "text.txt", folder / "out"
    text.write_text(TEXT)
    given = {"ratio": 3.0, "effort": "fast", "nsamples": 6, "seqlen": 48, "prune": "off", **options}
    return source, out, compress(source, out, calibration=[text], calibration_only=True, **given)


@torch.no_grad()
def _logits(model: Any, family: str) -> torch.Tensor:
    count, image = IMAGES[family]
    ids = torch.tensor([[5, 6, *[IMAGE_TOKEN] * count, 7, 8, 9]])
    kinds = (ids == IMAGE_TOKEN).int()
    named = {"token_type_ids": kinds} if family == "gemma3" else {}
    named |= {"mm_token_type_ids": kinds} if family.startswith("qwen") else {}
    return model.eval()(input_ids=ids, **image, **named).logits


@pytest.mark.parametrize("family", IMAGES)
def test_text_and_images_as_the_dense_model_with_the_decoded_weights(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    source, out, report = _compressed(family, tmp_path)
    _, difference = compare(source, out)
    assert difference < 1e-3
    model: Any = AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float32)
    dense: Any = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32)
    blind = _logits(dense, family)
    parameters = dict(dense.named_parameters(remove_duplicate=False))
    for name in open_artifact(out).blobs:
        parameters[name].data.copy_(read_tensor(out, name))
    expected = _logits(dense, family)
    assert float((expected - blind).abs().max()) > 0  # the decoded weights are others than the original's

    difference = float((_logits(model, family) - expected).abs().max() / expected.std())
    assert difference < 1e-4
    stored = load_file(out / "model.safetensors")
    original = load_file(source / "model.safetensors")
    towers = [row for row in report.components if row.role == "tower"]
    assert len(towers) > 3
    exact = {name: tensor for name, tensor in stored.items() if tensor.dtype == torch.bfloat16}
    assert {row.name for row in towers} <= exact.keys()
    assert sum(row.bytes for row in towers) == sum(2 * row.parameters for row in towers)
    assert all(any(torch.equal(tensor, other) for other in original.values()) for tensor in exact.values())
    language = {"embedding", "head", "q", "k", "v", "o", "gate", "up", "down"}
    assert all(row.dense is None for row in report.components if row.role in language)
    assert report.ratio >= 3.0


def test_the_highest_ratio_counts_the_tower(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="cannot be reached") as caught:
        _compressed("qwen2_vl", tmp_path, ratio=6.0)
    assert "ask for --ratio" in str(caught.value)
    assert not (tmp_path / "out").exists()
