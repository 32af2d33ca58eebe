"""Tiny checkpoints in every released number format, and text to calibrate them with."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

Make = Callable[..., Path]
Edit = Callable[[dict[str, torch.Tensor]], None]
BLOCK = 24
"""Rows and columns of an FP8 scale block in these tests. No dimension of the tiny models is a multiple of it, so every
last block is partial."""
_TEXT = "The quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs. "


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(_TEXT * 60)
    return path


@pytest.fixture(scope="session")
def released(tiny_checkpoint: Make, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`released(form)`: a tiny checkpoint of a family of TINY_CONFIGS, or of one in DeepSeek's FP8 or FP4 formats."""
    made: dict[str, Path] = {}

    def make(form: str) -> Path:
        if form in made:
            return made[form]
        family = form.removesuffix("_fp8").removesuffix("_fp4")
        # Enough indexer heads that the projection is compressed, and an index_topk as long as the texts here: the
        # releases choose 2048 tokens.
        changes = {"index_n_heads": 16, "index_topk": 64} if family in ("deepseek_v32", "deepseek_v4") else {}
        source = tiny_checkpoint(family, **changes)
        if form == family:
            made[form] = source
        elif family == "deepseek_v4":
            section = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [BLOCK, BLOCK]}
            made[form] = _copy(source, tmp_path_factory.mktemp(form) / "model", _to_v4_formats, section)
        else:
            section = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
            made[form] = _copy(source, tmp_path_factory.mktemp(form) / "model", _to_fp8, section)
        return made[form]

    return make


@pytest.fixture(scope="session")
def predicting(
    released: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """`predicting(form)`: `released(form)` with one multi-token-prediction layer as in the releases."""
    made: dict[str, Path] = {}

    def make(form: str) -> Path:
        if form not in made:
            add = _add_v4_predictor if form.startswith("deepseek_v4") else _add_v3_predictor
            section = json.loads((released(form) / "config.json").read_text())["quantization_config"]
            made[form] = _copy(released(form), tmp_path_factory.mktemp(f"{form}_mtp") / "model", add, section)
        return made[form]

    return make


def _add_v3_predictor(tensors: dict[str, torch.Tensor]) -> None:
    """Layer 3 of a three-layer model: a decoder layer, its input projection, copies of embedding and head."""
    for name in [name for name in tensors if name.startswith("model.layers.2.")]:
        tensors[name.replace("layers.2.", "layers.3.")] = _other_values(tensors[name])
    prefix, hidden = "model.layers.3", tensors["model.norm.weight"].numel()
    bias = f"{prefix}.mlp.gate.e_score_correction_bias"
    tensors[bias] = (
        tensors[bias].float() / 3
    )  # float32 in the releases; dividing makes it not exact in bfloat16
    tensors[f"{prefix}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{prefix}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    tensors[f"{prefix}.eh_proj.weight"] = _projection(hidden, 2 * hidden)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{prefix}.{norm}.weight"] = torch.rand(hidden).to(torch.bfloat16)


def _add_v4_predictor(tensors: dict[str, torch.Tensor]) -> None:
    """`mtp.0`: a decoder layer with plain attention, two projections in FP8, and a hyper-connection head."""
    last = [name for name in tensors if name.startswith("layers.3.") and "compressor" not in name]
    for name in last:
        tensors[name.replace("layers.3.", "mtp.0.")] = _other_values(tensors[name])
    hidden = tensors["norm.weight"].numel()
    for part in ("e_proj", "h_proj"):
        stored, _ = _blocks(_projection(hidden, hidden).float())
        tensors[f"mtp.0.{part}.weight"] = stored
        tensors[f"mtp.0.{part}.scale"] = _e8m0(torch.full((-(-hidden // BLOCK),) * 2, -9.0))
    for norm in ("enorm", "hnorm", "norm"):
        tensors[f"mtp.0.{norm}.weight"] = torch.rand(hidden).to(torch.bfloat16)
    for part in ("base", "fn", "scale"):
        tensors[f"mtp.0.hc_head_{part}"] = _other_values(tensors[f"hc_head_{part}"])


def _other_values(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in reverse order of rows, which is valid in every format."""
    return tensor.view(torch.uint8).flip(0).view(tensor.dtype) if tensor.itemsize == 1 else tensor.flip(0)


def _projection(rows: int, cols: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows + cols)
    return (torch.randn(rows, cols, generator=generator) / cols**0.5).to(torch.bfloat16)


def _copy(source: Path, target: Path, edit: Edit, section: dict[str, object]) -> Path:
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    edit(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    return target


def _to_fp8(tensors: dict[str, torch.Tensor]) -> None:
    """Store every projection as V3 and R1 do: e4m3 with one float32 `weight_scale_inv` per block."""
    for name in [name for name in tensors if re.search(r"(_proj|with_mqa|wq_b|wk)\.weight$", name)]:
        if "weights_proj" in name:
            continue
        tensors[name], tensors[f"{name}_scale_inv"] = _blocks(tensors[name].float())


def _blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, cols = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -cols % BLOCK, 0, -rows % BLOCK))
    grid = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = grid.abs().amax((1, 3)) / 448.0
    stored = (grid / scale[:, None, :, None]).flatten(2, 3).flatten(0, 1)[:rows, :cols]
    return stored.contiguous().to(torch.float8_e4m3fn), scale


def _to_v4_formats(tensors: dict[str, torch.Tensor]) -> None:
    """Store attention in FP8 with powers of two as scales, and routed experts in FP4 with one scale per 32 values."""
    for name in [name for name in tensors if re.search(r"attn\.w(q_a|q_b|kv|o_a|o_b)\.weight$", name)]:
        stored, scale = _blocks(tensors[name].float())
        exponent = scale.log2().ceil().clamp(-127, 127)
        ratio = (scale / exponent.exp2()).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        ratio = ratio[: stored.shape[0], : stored.shape[1]]
        tensors[name] = (stored.float() * ratio).to(torch.float8_e4m3fn)
        tensors[name.removesuffix("weight") + "scale"] = _e8m0(exponent)
    for name in [name for name in tensors if re.search(r"experts\.\d+\.w\d\.weight$", name)]:
        groups = tensors[name].float().unflatten(1, (-1, 32))
        exponent = (groups.abs().amax(2) / 6.0).log2().ceil()
        values = groups / exponent.exp2()[:, :, None]
        levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        code = (values.abs()[..., None] - levels).abs().argmin(-1) + 8 * (values < 0)
        code = code.flatten(1).to(torch.uint8)
        tensors[name] = (code[:, 0::2] | code[:, 1::2] << 4).view(torch.int8)
        tensors[name.removesuffix("weight") + "scale"] = _e8m0(exponent)


def _e8m0(exponent: torch.Tensor) -> torch.Tensor:
    return (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
