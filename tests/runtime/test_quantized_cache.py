"""transformers' quantized KV caches under compressed models."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import QuantizedCache

from ciuic_cli import load
from ciuic_cli.evaluation.bench_process import cache_keyword

GROUPED = {"q_group_size": 4, "residual_length": 4}
"""Numbers that share a scale, and unquantized tokens: small, as the tiny models' heads are."""

CACHES = {
    "fp8": {"backend": "fp8"},
    "8 bits": {"backend": "hqq", "nbits": 8, "axis_key": 1, "axis_value": 1, **GROUPED},
    "4 bits": {"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1, **GROUPED},
    "quanto": {"backend": "quanto", "nbits": 4, **GROUPED},
}
PACKAGES = {"hqq": "hqq", "quanto": "optimum"}


def options_of(cache: str) -> dict[str, Any]:
    options = dict(CACHES[cache])
    package = PACKAGES.get(str(options["backend"]))
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    return options


@torch.inference_mode()
def stepwise(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Logits [batch, tokens, vocabulary] of all but the first five tokens, one at a time."""
    held = {cache_keyword(model): cache}
    model(ids[:, :5], **held)
    return torch.cat([model(ids[:, n : n + 1], **held).logits for n in range(5, ids.shape[1])], dim=1)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("cache", CACHES)
def test_same_logits_as_the_dense_model_with_the_same_cache(
    family: str, cache: str, artifact: Callable[..., Any], prompt: torch.Tensor
) -> None:
    """And other logits than without quantization; 8 bits are nearest to those."""
    options = options_of(cache)
    built = artifact(family)
    model = load(built.folder, device="cpu", dtype=torch.float32)
    dense = built.dense_model()
    logits, expected = (
        stepwise(m, prompt, QuantizedCache(**options, config=m.config)) for m in (model, dense)
    )
    exact = model(prompt).logits[:, 5:]
    spread = float((expected - exact).norm() / exact.norm())
    assert 1e-6 < spread < {"fp8": 0.3, "8 bits": 0.02}.get(cache, 0.5)
    assert float((logits - expected).norm() / expected.norm()) < 0.2 * spread + 2e-3


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("cache", CACHES)
def test_generation(family: str, cache: str, artifact: Callable[..., Any], prompt: torch.Tensor) -> None:
    """Through `generate`, for sequences of different lengths."""
    options = options_of(cache)
    model = load(artifact(family).folder, device="cpu", dtype=torch.float32)
    mask = torch.ones_like(prompt)
    mask[0, :6] = 0
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(
        prompt,
        attention_mask=mask,
        cache_implementation="quantized",
        cache_config=options,
        return_dict_in_generate=True,
        **settings,
    )
    assert found.sequences.shape == (2, prompt.shape[1] + 8)
    held = getattr(found, "cache", None) or found.past_key_values
    assert isinstance(held, QuantizedCache)
