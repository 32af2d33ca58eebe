"""GPT-OSS as it is released: experts in MXFP4, groups of 32 values as a dimension of their own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_table import TEXT
from safetensors.torch import load_file, save_file
from tiny_families import make_family
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ciuic_cli import read_tensor
from ciuic_cli.artifact.reader import open_artifact
from ciuic_cli.checkpoint.model_map import map_model
from ciuic_cli.checkpoint.reader import Checkpoint, open_checkpoint
from ciuic_cli.compression.pipeline import compress
from ciuic_cli.errors import InputError

Tensors = dict[str, torch.Tensor]
SECTION = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def to_mxfp4(tensors: Tensors) -> None:
    """Replace each stack of experts (experts, inputs, outputs) by random blocks and scales of its shape."""
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(
            0, 256, (*shape, 16), generator=generator, dtype=torch.uint8
        )
        tensors[f"{name}_scales"] = torch.randint(118, 124, shape, generator=generator, dtype=torch.uint8)


def _changed(source: Path, target: Path, edit: Callable[[Tensors], object]) -> Path:
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    edit(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": SECTION}))
    return target


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mxfp4")
    return _changed(make_family("gpt_oss", folder / "dense"), folder / "model", to_mxfp4)


def _decoded(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """(experts, inputs, outputs), decoded by transformers."""
    blocks, scales = checkpoint.read(name), checkpoint.read(f"{name}_scales")
    return convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)


def test_the_experts_are_those_that_transformers_decodes(gpt_oss: Path) -> None:
    checkpoint = open_checkpoint(gpt_oss)
    model_map = map_model(checkpoint)
    assert not model_map.warnings
    for part in ("gate_up_proj", "down_proj"):
        name = f"model.layers.1.mlp.experts.{part}"
        expected, parameter = _decoded(checkpoint, name), model_map.parameters[name]
        assert parameter.compress and parameter.transposed
        assert torch.equal(checkpoint.read_decoded(name), expected)
        assert torch.equal(checkpoint.read_decoded(name, (1, 3)), expected[1:3])
        for expert in range(len(expected)):
            assert torch.equal(model_map.read_expert(name, expert), expected[expert].mT)


@torch.no_grad()
def test_from_the_released_files_to_logits(gpt_oss: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    out = tmp_path / "out"
    report = compress(
        gpt_oss,
        out,
        ratio=4.0,
        effort="fast",
        nsamples=6,
        seqlen=48,
        calibration=[text],
        calibration_only=True,
    )
    experts = [row for row in report.components if row.role.startswith("expert")]
    assert len(experts) == 6 and all(row.dense is None for row in experts)
    assert report.measured_kl is not None and report.measured_kl < 0.5
    model_map = map_model(open_checkpoint(gpt_oss))
    dense: Any = model_map.skeleton(dtype=torch.float32)
    model_map.materialise(dense, "", torch.float32)
    parameters = dict(dense.named_parameters())
    for name in open_artifact(out).blobs:
        parameters[name].data.copy_(read_tensor(out, name))
    model: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ids = torch.randint(3, 263, (2, 40), generator=torch.Generator().manual_seed(0))
    expected, found = dense(ids).logits, model(ids).logits
    assert float((found - expected).abs().max() / expected.std()) < 1e-3


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors, name: tensors.pop(f"{name}_scales"), "without its scale"),
        (lambda tensors, name: _cut(tensors, f"{name}_scales"), "the scale has shape"),
        (lambda tensors, name: _cut(tensors, f"{name}_blocks"), "the scale has shape"),
    ],
)
def test_blocks_and_scales_that_do_not_fit(
    edit: Callable[[Tensors, str], object], message: str, gpt_oss: Path, tmp_path: Path
) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    folder = _changed(gpt_oss, tmp_path / "model", lambda tensors: edit(tensors, name))
    with pytest.raises(InputError, match=message):
        open_checkpoint(folder)


def _cut(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name][:, :-1].contiguous()
