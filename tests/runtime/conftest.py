"""Artifacts made by hand from tiny checkpoints, each with the dense model that its blobs stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ciuic_cli
from ciuic_cli.checkpoint.model_map import map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.codecs import trellis
from ciuic_cli.codecs.packing import ExpertStack, PackedMatrix, decode_scales, encode_scales
from ciuic_cli.codecs.transform import transform
from ciuic_cli.runtime import registration

registration.install()

BITS = (4, 2, 3, 5, 6, 8)


def pack(weight: torch.Tensor, bits: list[int] | int = 4, *, rank: int = 0, seed: int = 0) -> PackedMatrix:
    """A matrix (rows, cols) in the trellis code, window 12; `bits` per row group, cycled."""
    rows, cols = weight.shape
    weight = weight.to(torch.float32)
    lowrank = None
    if rank:
        u, s, v = torch.linalg.svd(weight, full_matrices=False)
        right, left = pack(v[:rank], 6, seed=seed), pack((u[:, :rank] * s[:rank]).T, 6, seed=seed)
        lowrank = (right, left)
        weight = weight - dense(left).T @ dense(right)
    groups = -(-rows // 16)
    row_bits = np.resize(np.atleast_1d(np.asarray(bits, dtype=np.uint8)), groups)
    in_basis = transform(weight, seed)
    base, row_scale = encode_scales(in_basis.pow(2).mean(dim=1).sqrt().numpy())
    scales = np.zeros(16 * groups, dtype=np.float32)
    scales[:rows] = decode_scales(base, row_scale)
    in_basis = torch.nn.functional.pad(in_basis, (0, 0, 0, 16 * groups - rows))
    codes, _ = trellis.round_matrix(in_basis, scales, row_bits, L=12)
    return PackedMatrix(rows, cols, 12, seed, base, row_bits, row_scale, codes, lowrank)


def dense(packed: PackedMatrix) -> torch.Tensor:
    """The matrix that a packed one stands for, float32 (rows, cols)."""
    result = trellis.decode(packed, original_basis=True)
    if packed.lowrank is not None:
        right, left = packed.lowrank
        result = result + dense(left).T @ dense(right)
    return result


def as_tensor(packed: PackedMatrix | ExpertStack) -> torch.Tensor:
    """The blob, uint8 (nbytes,)."""
    return torch.frombuffer(bytearray(packed.to_bytes()), dtype=torch.uint8)


@dataclass(frozen=True)
class Made:
    """An artifact's folder, its tensors as stored, and the dense values of the compressed ones."""

    folder: Path
    source: Path
    stored: dict[str, torch.Tensor]
    decoded: dict[str, torch.Tensor]

    @property
    def stored_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.folder.glob("*.safetensors"))

    def dense_model(self, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
        """The original's architecture with the decoded weights."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.source, dtype=dtype, **options)
        state = dict(model.named_parameters())
        with torch.no_grad():
            for name, value in self.decoded.items():
                state[name].copy_(value)
        return model.eval()


def make_artifact(source: Path, folder: Path, *, rank: int = 0, prune: bool = True, **config: Any) -> Made:
    """Compress every matrix of a checkpoint to mixed bits; `config` overrides fields of quantization_config.

    Expert 1 of every stack is pruned if `prune`; every third matrix gets a low-rank part if `rank`.
    """
    model_map = map_model(open_checkpoint(source))
    stored: dict[str, torch.Tensor] = {}
    decoded: dict[str, torch.Tensor] = {}
    for number, (name, parameter) in enumerate(model_map.parameters.items()):
        if parameter.tied_to is not None:
            continue
        value = model_map.read(name)
        bits = list(np.roll(BITS, number))
        if not parameter.compress:
            stored[name] = value.clone().contiguous()
        elif value.dim() == 3:
            experts = [pack(w, 0 if prune and e == 1 else bits) for e, w in enumerate(value)]
            stored[name] = as_tensor(ExpertStack(tuple(experts)))
            decoded[name] = torch.stack([dense(expert) for expert in experts])
        else:
            packed = pack(value, bits, rank=rank if number % 3 == 0 else 0)
            stored[name], decoded[name] = as_tensor(packed), dense(packed)
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            (folder / file.name).write_bytes(file.read_bytes())
    document = json.loads((folder / "config.json").read_text())
    document["quantization_config"] = {
        "quant_method": "ciuic",
        "format_version": 1,
        "bits_per_weight": 4.0,
        "ciuic_version": ciuic_cli.__version__,
        **config,
    }
    (folder / "config.json").write_text(json.dumps(document))
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return Made(folder, source, stored, decoded)


@pytest.fixture(scope="session")
def artifact(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Made]:
    """`artifact(family, **options of make_artifact)`, made once per session: read it, never write into it."""
    made: dict[str, Made] = {}

    def make(family: str, **options: Any) -> Made:
        key = repr((family, sorted(options.items())))
        if key not in made:
            folder = tmp_path_factory.mktemp(f"{family}-artifact")
            made[key] = make_artifact(tiny_checkpoint(family), folder, **options)
        return made[key]

    return make


@pytest.fixture
def prompt() -> torch.Tensor:
    """Token ids (2, 21): more rows than the small-batch kernels take."""
    return torch.randint(0, 260, (2, 21), generator=torch.Generator().manual_seed(3))
