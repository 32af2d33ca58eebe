"""Weights in 8 bits: bytes, freed gradients, rounding without loss, synchronisation, and exact continuation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ciuic_cli.codecs.blockcode.code import decode
from ciuic_cli.train.loss import chunked_loss
from ciuic_cli.train.memory import weights
from ciuic_cli.train.memory.weights import LayerwiseOptimizer


@pytest.fixture
def make(tiny_checkpoint: Callable[..., Path]) -> Callable[[str], Any]:
    from transformers import AutoModelForCausalLM

    def load(family: str = "llama") -> Any:
        model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint(family), dtype=torch.float32)
        return model.train()

    return load


def adam(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, foreach=False)


def batch(seed: int) -> torch.Tensor:
    return torch.randint(0, 250, (2, 32), generator=torch.Generator().manual_seed(seed))


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        ids = batch(step % 4)
        loss = chunked_loss(model, {"input_ids": ids}, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("family", ["llama_tied", "deepseek_v3"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_with_an_exact_code_every_step_is_that_of_the_optimizer(
    make: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, family: str, checkpointing: bool
) -> None:
    """Decoding, freeing, and updates inside the backward pass change no bit of the losses."""

    def keep(values: torch.Tensor, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(values=values.detach().clone(), nbytes=values.nbytes)

    def give(kept: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        return kept.values if out is None else out.copy_(kept.values)

    monkeypatch.setattr(weights, "encode", keep)
    monkeypatch.setattr(weights, "decode", give)
    dense, stored = make(family), make(family)
    if checkpointing:
        stored.gradient_checkpointing_enable({"use_reentrant": False})
    exact = train(dense, torch.optim.AdamW(dense.parameters(), 1e-3, foreach=False), range(6))
    optimizer = LayerwiseOptimizer(stored, adam, 1e-3, sync_steps=2)
    assert train(stored, optimizer, range(6)) == exact
    assert exact[-1] < 0.95 * exact[0]
    resident = [weight.parameter.untyped_storage().nbytes() for weight in optimizer._weights.values()]
    assert len(resident) > 5 and max(resident) == 0, "decoded weights are freed"
    assert all(parameter.grad is None for parameter in stored.parameters())


def test_in_8_bits_losses_follow_those_of_dense_weights(make: Callable[[str], Any]) -> None:
    dense, low = make("llama"), make("llama")
    exact = train(dense, torch.optim.AdamW(dense.parameters(), 1e-3), range(12))
    found = train(low, LayerwiseOptimizer(low, adam, 1e-3, sync_steps=5), range(12))
    assert exact[-1] < 0.8 * exact[0]
    assert found != exact and found[-1] == pytest.approx(exact[-1], rel=0.01)


def test_at_most_two_layers_have_dense_weights_and_gradients_at_once(make: Callable[[str], Any]) -> None:
    model = make("llama")
    optimizer = LayerwiseOptimizer(model, adam, 1e-3)
    per_layer = sum(p.numel() for p in model.model.layers[0].parameters())
    most = {"dense": 0, "gradients": 0}

    def look(_: torch.Tensor) -> None:
        layers = [p for p in model.model.layers.parameters() if p in by_parameter]
        most["dense"] = max(most["dense"], sum(p.untyped_storage().nbytes() // 4 for p in layers))
        most["gradients"] = max(most["gradients"], sum(p.numel() for p in layers if p.grad is not None))

    by_parameter = {weight.parameter for weight in optimizer._weights.values()}
    for parameter in by_parameter:
        parameter.register_post_accumulate_grad_hook(look)
    train(model, optimizer, range(2))
    assert 0 < most["dense"] <= 2 * per_layer and most["gradients"] <= per_layer


def test_bytes_per_parameter(make: Callable[[str], Any]) -> None:
    model = make("llama")
    count = sum(p.numel() for p in model.parameters())
    small = sum(p.numel() for p in model.parameters() if p.numel() < 4096)
    optimizer = LayerwiseOptimizer(model, adam, 1e-3)
    train(model, optimizer, range(1))
    found = optimizer.bytes()
    assert found["weights"] == pytest.approx(1.03125 * (count - small) + 4 * small, rel=1e-3)
    assert found["states"] == pytest.approx(8 * count, rel=1e-2)
    assert found["residuals"] == 4 * (count - small)


def test_rounding_errors_are_added_back(make: Callable[[str], Any]) -> None:
    """Without updates, codes and residual together keep the original weight, and a synchronisation uses both."""
    model = make("llama")
    original = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = LayerwiseOptimizer(model, adam, 0.0, sync_steps=2)
    for steps in (range(1), range(1, 2), range(2, 3)):
        train(model, optimizer, steps)
        for name, weight in optimizer._weights.items():
            values = decode(weight.encoded).view(original[name].shape)
            assert not torch.equal(values, original[name])
            assert torch.allclose(values + weight.residual, original[name], atol=1e-6)


def test_a_continued_run_has_the_same_bytes(make: Callable[[str], Any], tmp_path: Path) -> None:
    model = make("deepseek_v3")
    optimizer = LayerwiseOptimizer(model, adam, 1e-3, sync_steps=3, seed=7)
    train(model, optimizer, range(4))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    wanted = train(model, optimizer, range(4, 8))
    other = make("deepseek_v3")
    continued = LayerwiseOptimizer(other, adam, 1e-3, sync_steps=3, seed=7)
    continued.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert train(other, continued, range(4, 8)) == wanted
    optimizer.finish()
    continued.finish()
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two), name
