"""Prompts of loaded models by the native attention: the same results as transformers', and only where it fits."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from packed_weights import relative_error
from transformers import StaticCache

from ciuic_cli.codecs import native
from ciuic_cli.evaluation.bench_process import cache_keyword
from ciuic_cli.runtime.attention import prompt_kernel, prompts

pytestmark = pytest.mark.skipif(native.cpu_kernels() == "amx", reason="torch attends to prompts with AMX")

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "mixtral", "qwen2_moe", "deepseek_v3")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the queries that the kernel got."""
    shapes: list[tuple[int, ...]] = []
    attention = prompt_kernel.attention

    def counted(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        shapes.append(tuple(query.shape))
        return attention(query, *args, **kwargs)

    monkeypatch.setattr(prompt_kernel, "attention", counted)
    return shapes


@torch.no_grad()
def logits(model: Any, mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    ids = torch.randint(3, 90, (2, 40), generator=torch.Generator().manual_seed(1))
    return model(input_ids=ids, attention_mask=mask, **options).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_as_the_dense_model(
    family: str, load: Callable[..., Any], artifact: Callable[..., Any], calls: list[tuple[int, ...]]
) -> None:
    model = load(family, attn_implementation="sdpa")
    dense = artifact(family, prune=False).dense_model()
    assert relative_error(logits(model), logits(dense)) < 1e-3
    assert len(calls) == model.config.num_hidden_layers
    assert all(shape[2] == 40 for shape in calls)


@pytest.mark.parametrize("left", [True, False])
def test_padded_batches(
    left: bool, load: Callable[..., Any], artifact: Callable[..., Any], calls: list[tuple[int, ...]]
) -> None:
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, slice(0, 9) if left else slice(31, 40)] = 0
    found = logits(load("llama"), mask)
    expected = logits(artifact("llama", prune=False).dense_model(), mask)
    assert calls
    assert relative_error(found[mask.bool()], expected[mask.bool()]) < 1e-3


@torch.no_grad()
def test_a_prompt_in_two_parts_and_a_static_cache(
    load: Callable[..., Any], calls: list[tuple[int, ...]]
) -> None:
    model = load("llama")
    ids = torch.randint(3, 90, (1, 40), generator=torch.Generator().manual_seed(2))
    whole = model(ids).logits[:, -1]
    name = cache_keyword(model)
    first = getattr(model(ids[:, :25], use_cache=True), name)
    second = model(ids[:, 25:], use_cache=True, **{name: first}).logits[:, -1]
    static = StaticCache(config=model.config, max_cache_len=64)
    at_once = model(ids, use_cache=True, **{name: static}).logits[:, -1]
    assert len(calls) == 4 * model.config.num_hidden_layers
    assert relative_error(second, whole) < 1e-5
    assert relative_error(at_once, whole) < 1e-5


def test_other_implementations_and_gradients_are_left_alone(
    load: Callable[..., Any], calls: list[tuple[int, ...]]
) -> None:
    model = load("llama", attn_implementation="eager")
    expected = logits(model)
    ids = torch.randint(3, 90, (2, 40), generator=torch.Generator().manual_seed(1))
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    model.set_attn_implementation("sdpa")
    model(inputs_embeds=embedded).logits.sum().backward()
    assert not calls
    assert embedded.grad is not None and bool(embedded.grad.any())
    assert relative_error(logits(model), expected) < 1e-5
    assert calls


def test_copies_compute_the_same(load: Callable[..., Any], calls: list[tuple[int, ...]]) -> None:
    model = load("llama")
    expected = logits(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        calls.clear()
        assert torch.equal(logits(other), expected)
        assert len(calls) == model.config.num_hidden_layers
        assert isinstance(other.model.layers[0].self_attn, prompts.PromptAttention)


def test_torch_compile_has_no_break(load: Callable[..., Any], calls: list[tuple[int, ...]]) -> None:
    model = load("llama")
    expected = logits(model)
    calls.clear()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert relative_error(logits(compiled, use_cache=False), expected) < 1e-5
    assert not calls
