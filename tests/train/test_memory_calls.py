"""The short names compute what they name, and train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ciuic_cli.train.memory.activations import ActivationStore
from ciuic_cli.train.memory.calls import ActivationCache, AdaptiveQuantizer, LowBitAdamW


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()


def gradient(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_a_cached_model_has_the_gradients_of_the_store(tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint("llama")
    ids = torch.randint(0, 250, (2, 64), generator=torch.Generator().manual_seed(0))
    exact, stored, cached = load(folder), load(folder), ActivationCache.around(load(folder))
    exact(input_ids=ids, labels=ids).loss.backward()
    with ActivationStore(stored):
        loss = stored(input_ids=ids, labels=ids).loss
    loss.backward()
    cached(input_ids=ids, labels=ids).loss.backward()
    assert torch.equal(gradient(cached), gradient(stored)) and not torch.equal(
        gradient(cached), gradient(exact)
    )
    assert 0 < cached.cache.stored_bytes < 0.5 * cached.cache.original_bytes


def test_the_optimizer_trains_weights_in_few_bits(tiny_checkpoint: Callable[..., Path]) -> None:
    pytest.importorskip("bitsandbytes")
    ids = torch.randint(0, 250, (2, 64), generator=torch.Generator().manual_seed(0))
    used = []
    for quantizer in (None, AdaptiveQuantizer()):
        model = load(tiny_checkpoint("llama"))
        optimizer = LowBitAdamW(model, 3e-3, sync_steps=4, quantizer=quantizer)
        losses = []
        for _ in range(12):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < 0.8 * losses[0]
        used.append(optimizer.bytes()["weights"])
    assert used[1] < 0.9 * used[0]
