"""A finished artifact is loaded and run before it is published: faults planted in the loader publish nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import compress_tiny, weights_of

from ciuic_cli.compression.loaded_model import allowed_difference
from ciuic_cli.errors import InputError, TargetError
from ciuic_cli.evaluation import opening
from ciuic_cli.runtime import modules, plugin, weights
from ciuic_cli.runtime.modules import CompressedEmbedding, CompressedLinear

OTHERWISE = "predicts otherwise than its weights do in the original model"


def wrong_row_order(patch: pytest.MonkeyPatch) -> str:
    product = weights.PlainWeight.product
    patch.setattr(weights.PlainWeight, "product", lambda self, x: product(self, x).flip(-1))
    return "llama"


def wrong_row_scale(patch: pytest.MonkeyPatch) -> str:
    product = weights.PlainWeight.product
    patch.setattr(weights.PlainWeight, "product", lambda self, x: product(self, x) * 1.25)
    return "llama"


def wrong_embedding_scale(patch: pytest.MonkeyPatch) -> str:
    make = CompressedEmbedding.__init__

    def without_scale(self: CompressedEmbedding, *arguments: Any) -> None:
        make(self, *arguments)
        self.scale = None

    patch.setattr(CompressedEmbedding, "__init__", without_scale)
    return "gemma3"


def wrong_attention_mask(patch: pytest.MonkeyPatch) -> str:
    finish = plugin.finish_modules

    def unmasked(model: Any, *arguments: Any) -> None:
        finish(model, *arguments)
        model.model.forward = _without_mask(model.model.forward)

    patch.setattr(plugin, "finish_modules", unmasked)
    return "llama"


def _without_mask(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(input_ids: torch.Tensor, **options: Any) -> Any:
        mask = torch.zeros(1, 1, input_ids.shape[1], input_ids.shape[1])
        return forward(input_ids=input_ids, **{**options, "attention_mask": mask})

    return run


def wrong_expert_mask(patch: pytest.MonkeyPatch) -> str:
    """Every router but the right experts: the first expert of each layer is never chosen."""
    mask_router = plugin.mask_router

    def mask_first(router: Any, pruned: torch.Tensor) -> None:
        mask_router(router, torch.arange(len(pruned)) == 0)

    patch.setattr(plugin, "mask_router", mask_first)
    return "mixtral"


def lost_bias(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(
        CompressedLinear, "forward", lambda self, x: modules.ops.linear(x, self.blob, self.out_features)
    )
    return "qwen2"


@pytest.mark.parametrize(
    "fault",
    [
        wrong_row_order,
        wrong_row_scale,
        wrong_embedding_scale,
        wrong_attention_mask,
        wrong_expert_mask,
        lost_bias,
    ],
)
def test_a_fault_in_the_loader_publishes_nothing(
    fault: Callable[[pytest.MonkeyPatch], str],
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "outputs"
    folder.mkdir()
    source = tiny_checkpoint(fault(monkeypatch))
    with pytest.raises(TargetError, match=OTHERWISE) as caught:
        compress_tiny(source, folder / "out", text)
    assert caught.value.exit_code == 4 and "Nothing was published" in caught.value.message
    assert not list(folder.iterdir())


def test_an_artifact_that_cannot_run_publishes_nothing(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: CompressedLinear, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such product")

    monkeypatch.setattr(CompressedLinear, "forward", broken)
    with pytest.raises(InputError, match=r"as LlamaForCausalLM: .*: no such product") as caught:
        compress_tiny(tiny_checkpoint("llama"), tmp_path / "out", text)
    assert caught.value.exit_code == 3
    assert not (tmp_path / "out").exists()


def test_an_artifact_larger_than_memory_runs_from_disk(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_checkpoint("deepseek_v3")
    plain = compress_tiny(source, tmp_path / "plain", text)
    places: list[set[str]] = []
    load_offloaded = opening.load_offloaded

    def recorded(folder: Path, chosen: dict[str, str], *arguments: Any) -> Any:
        model = load_offloaded(folder, chosen, *arguments)
        assert all(parameter.is_meta for parameter in model.model.layers[1].parameters())
        places.append({name for name, place in chosen.items() if place == "disk"})
        return model

    monkeypatch.setattr(opening, "load_offloaded", recorded)
    layers = [f"model.layers.{number}." for number in range(3)]
    with opening.artifact_in_memory(tmp_path / "plain", torch.device("cpu"), layers, most=1000):
        pass
    monkeypatch.setattr(opening, "free_memory", lambda target: 0)
    offloaded = compress_tiny(source, tmp_path / "offloaded", text)
    assert places == 2 * [{f"model.layers.{number}" for number in range(3)}]
    assert offloaded.measured_kl == plain.measured_kl
    assert weights_of(tmp_path / "offloaded") == weights_of(tmp_path / "plain")


def test_the_limit_does_not_grow_with_the_fault() -> None:
    random = np.random.default_rng(0)
    rounded = random.exponential(0.05, 512)
    noise = rounded * random.normal(1, 0.01, 512)
    fault = rounded + random.exponential(2.0, 512)
    small = allowed_difference(rounded, noise, torch.float32)
    large = allowed_difference(rounded, fault, torch.float32)
    mean = float(np.mean(rounded))
    assert small < 0.03 * mean
    assert small < large < 0.5 * mean
    assert allowed_difference(rounded, noise, torch.bfloat16) > small + 4e-3
