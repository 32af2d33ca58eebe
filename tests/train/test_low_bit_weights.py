"""Weights in 8 bits: bytes, freed gradients, rounding without loss, synchronisation, and exact continuation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ciuic_cli.errors import UsageError
from ciuic_cli.train.loss import chunked_loss
from ciuic_cli.train.memory import weight_codes
from ciuic_cli.train.memory.adaptive import AdaptiveQuantizer
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

    monkeypatch.setattr(weight_codes, "encode", keep)
    monkeypatch.setattr(weight_codes, "decode", give)
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
            values = weight.codes.load(torch.empty_like(original[name]))
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


def test_rows_with_large_gradients_get_8_bits_within_the_budget() -> None:
    errors = {"a": torch.ones(6, dtype=torch.float64), "b": torch.ones(4, dtype=torch.float64)}
    sizes = {"a": [64] * 6, "b": [64] * 4}
    none: dict[str, torch.Tensor | None] = {"a": None, "b": None}
    quantizer = AdaptiveQuantizer(bits=6, hysteresis=2)
    gradient = torch.full((96, 4), 0.1)
    gradient[32:64] = 1.0  # groups 2 and 3
    quantizer.observe("a", gradient)
    quantizer.observe("b", torch.full((64, 4), 0.5))
    chosen = quantizer.choose(errors, none, sizes)
    assert chosen["a"].tolist() == [False, False, True, True, False, False]
    assert int(chosen["b"].sum()) == 3, "6 bits on average: half of the 10 groups"
    # A little larger elsewhere: nothing changes. Much larger: the groups change.
    held: dict[str, torch.Tensor | None] = dict(chosen)
    for factor, changes in ((1.3, False), (3.0, True)):
        other = AdaptiveQuantizer(bits=6, hysteresis=2)
        moved = torch.full((96, 4), factor * 0.5)
        other.observe("a", moved)
        other.observe("b", torch.full((64, 4), 0.5))
        other.importance["a"][2:4] = 0.25
        again = other.choose(errors, held, sizes)
        assert (not torch.equal(again["a"], chosen["a"])) == changes, factor
        assert int(again["a"].sum() + again["b"].sum()) == 5
    with pytest.raises(UsageError, match="4 to 8"):
        AdaptiveQuantizer(bits=3)


def test_adaptive_weights_follow_dense_ones_in_fewer_bytes(
    make: Callable[[str], Any], tmp_path: Path
) -> None:
    dense, low = make("llama"), make("llama")
    exact = train(dense, torch.optim.AdamW(dense.parameters(), 1e-3), range(12))
    optimizer = LayerwiseOptimizer(low, adam, 1e-3, sync_steps=3, quantizer=AdaptiveQuantizer())
    found = train(low, optimizer, range(12))
    assert found != exact and found[-1] == pytest.approx(exact[-1], rel=0.03)
    count = sum(p.numel() for p in low.parameters())
    small = sum(p.numel() for p in low.parameters() if p.numel() < 4096)
    expected = (6 / 8 + 2 / 64) * (count - small)
    assert 0.95 * expected <= optimizer.bytes()["weights"] - 4 * small <= 1.01 * expected
    wide = [weight.codes.wide for weight in optimizer._weights.values()]
    assert any(one.any() and not one.all() for one in wide if one is not None)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    wanted = train(low, optimizer, range(12, 17))
    other = make("llama")
    continued = LayerwiseOptimizer(other, adam, 1e-3, sync_steps=3, quantizer=AdaptiveQuantizer())
    continued.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert train(other, continued, range(12, 17)) == wanted
