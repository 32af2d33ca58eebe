"""Every family and number format, from files to generated tokens: all matrices are compressed, logits stay close."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM

from ciuic_cli.checkpoint.model_map import ModelMap, map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.compression.pipeline import compress

FORMS = [
    "llama",
    "qwen2",
    "qwen3",
    "gemma3",
    "mistral",
    "mixtral",
    "qwen2_moe",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v3_fp8",
    "deepseek_v32",
    "deepseek_v32_fp8",
    "deepseek_v4",
    "deepseek_v4_fp4",
]
RATIO = 1.8
BOUND = 0.03
"""Bound of the median over tokens of the logits' squared error, as a share of their variance, at RATIO.

Not the mean: the weights are random, so for some tokens a small error changes the routing and thereby all logits.
"""


def must_be_compressed(model: nn.Module) -> set[str]:
    """Names of the weights of all linears, embeddings and experts, without routers (kept exactly) and tied heads."""
    heads = dict(model.all_tied_weights_keys)  # type: ignore[arg-type]
    found = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding) and not name.endswith("mlp.shared_expert_gate"):
            found.add(f"{name}.weight")
        found |= {f"{name}.{part}" for part, p in module.named_parameters(recurse=False) if p.dim() == 3}
    return found - set(heads)


@torch.no_grad()
def decoded_logits(model_map: ModelMap, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the original in float32, with FP8 and FP4 weights decoded."""
    model = model_map.skeleton(dtype=torch.float32)
    model_map.materialise(model, "", torch.float32)
    return model(ids).logits


@pytest.mark.parametrize("form", FORMS)
def test_from_the_original_files_to_generated_tokens(
    form: str, released: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    source, out = released(form), tmp_path / "out"
    report = compress(
        source,
        out,
        ratio=RATIO,
        effort="fast",
        nsamples=6,
        seqlen=48,
        calibration=[text],
        calibration_only=True,
        prune="off",
    )
    model_map = map_model(open_checkpoint(source))
    assert not model_map.warnings
    expected = must_be_compressed(model_map.meta_model())
    assert len(expected) > 10
    assert stored_blobs(out) == expected
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ids = torch.randint(3, 263, (2, 40), generator=torch.Generator().manual_seed(0))
    reference = decoded_logits(model_map, ids)
    with torch.no_grad():
        logits = model(ids).logits
    error = (logits - reference).square().mean(-1) / reference.var(-1)
    assert float(error.median()) < BOUND
    generated: Any = model.generate(ids[:, :20], max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert generated.shape == (2, 24)
    assert report.ratio_to_source_files == pytest.approx(
        open_checkpoint(source).source_bytes / report.artifact_bytes
    )


def stored_blobs(out: Path) -> set[str]:
    """Names of the artifact's compressed tensors: those stored as one-dimensional bytes."""
    found = set()
    for file in out.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                part = tensors.get_slice(name)
                if part.get_dtype() == "U8" and len(part.get_shape()) == 1:
                    found.add(name)
    return found
