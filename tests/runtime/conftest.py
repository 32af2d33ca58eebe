"""Fixtures: artifacts built from tiny checkpoints without `compress`, and the dense models that they decode to."""

from __future__ import annotations

import json
import sys
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
from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.runtime.routing import mask_router, routers

sys.path.insert(0, str(Path(__file__).parent))

from packed_weights import BITS, as_tensor, dense, pack


@dataclass(frozen=True)
class BuiltArtifact:
    """An artifact's folder, the checkpoint's folder, the stored tensors, and the decoded values of compressed ones."""

    folder: Path
    source: Path
    stored: dict[str, torch.Tensor]
    decoded: dict[str, torch.Tensor]

    @property
    def stored_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.folder.glob("*.safetensors"))

    def dense_model(self, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
        """The original architecture with the decoded weights; routers mask pruned experts."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.source, dtype=dtype, **options)
        state = dict(model.named_parameters())
        with torch.no_grad():
            for name, value in self.decoded.items():
                state[name].copy_(value)
        pruned = {
            name.removesuffix(".down_proj"): (value == 0).flatten(1).all(1)
            for name, value in self.decoded.items()
            if name.endswith(".down_proj")
        }
        for router, mask in routers(model, pruned):
            mask_router(router, mask)
        return model.eval()


def build_artifact(
    source: Path, folder: Path, *, rank: int = 0, prune: bool = True, **config: Any
) -> BuiltArtifact:
    """Compress every matrix of a checkpoint with mixed bits per weight.

    Args:
        rank: if not 0, every third matrix gets a low-rank part of this rank.
        prune: prune expert 1 of every stack.
        config: replaces fields of quantization_config.
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
            packed = pack(value, bits, rank=rank if number % 3 == 0 else 0, is_sorted=number % 2 == 1)
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
    return BuiltArtifact(folder, source, stored, decoded)


@pytest.fixture(scope="session")
def artifact(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., BuiltArtifact]:
    """`artifact(family, **options of build_artifact)`, built once per session. Tests must not write into it."""
    built: dict[str, BuiltArtifact] = {}

    def make(family: str, **options: Any) -> BuiltArtifact:
        key = repr((family, sorted(options.items())))
        if key not in built:
            folder = tmp_path_factory.mktemp(f"{family}-artifact")
            built[key] = build_artifact(tiny_checkpoint(family), folder, **options)
        return built[key]

    return make


@pytest.fixture(scope="session")
def make_artifact() -> Callable[..., BuiltArtifact]:
    """`make_artifact(checkpoint folder, output folder, **options of build_artifact)`."""
    return build_artifact


@pytest.fixture
def prompt() -> torch.Tensor:
    """Token ids (2, 21): with 42 rows, more than one batch of the CPU kernels."""
    return torch.randint(0, 260, (2, 21), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def load(artifact: Callable[..., Any]) -> Callable[..., Any]:
    """`load(family, **options of from_pretrained)`: the artifact's model, float32 unless `dtype` says otherwise."""

    def load(family: str, **options: Any) -> Any:
        from transformers import AutoModelForCausalLM

        built = artifact(family, prune=False)
        options = {"dtype": torch.float32, **options}
        return AutoModelForCausalLM.from_pretrained(built.folder, **options).eval()

    return load
