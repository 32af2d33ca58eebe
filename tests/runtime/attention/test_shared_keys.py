"""DeepSeek V4's attention by the native kernel, against float64 and transformers' own function."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from ciuic_cli.codecs import native
from ciuic_cli.evaluation.bench_process import cache_keyword
from ciuic_cli.runtime.attention import latent_kernel, shared_keys

pytestmark = pytest.mark.skipif(
    not native.interface().ciuic_has_latent_attention(), reason="needs a processor with AVX2"
)


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(torch.bfloat16)


@pytest.mark.parametrize("hidden", [None, float("-inf"), torch.finfo(torch.bfloat16).min])
@pytest.mark.parametrize(
    ("b", "heads", "s", "context", "columns"),
    [(1, 16, 1, 1, 512), (2, 5, 3, 77, 64), (1, 64, 1, 1300, 512), (1, 3, 2, 513, 32)],
)
def test_attention_with_sinks(
    b: int, heads: int, s: int, context: int, columns: int, hidden: float | None
) -> None:
    query, keys, sinks = gaussian(b, heads, s, columns), gaussian(b, 1, context, columns), torch.randn(heads)
    mask = None
    if hidden is not None:
        chosen = torch.rand(b, 1, s, context, generator=torch.Generator().manual_seed(0)) < 0.5
        chosen[..., 0] = False
        mask = torch.zeros(chosen.shape, dtype=torch.bfloat16).masked_fill(chosen, hidden)
    scores = query.double() @ keys.double().mT * 0.05
    scores = scores if mask is None else scores + mask
    with_sink = torch.cat([scores, sinks.double()[None, :, None, None].expand(b, -1, s, -1)], -1)
    expected = with_sink.softmax(-1)[..., :-1] @ keys.double()
    found = latent_kernel.attention_with_sinks(query, keys, mask, 0.05, sinks)
    assert float((found - expected).norm()) < 4e-3 * float(expected.norm())


def test_a_query_that_sees_no_token_gets_zeros() -> None:
    """The sink takes the whole softmax."""
    mask = torch.full((1, 1, 1, 70), torch.finfo(torch.bfloat16).min)
    found = latent_kernel.attention_with_sinks(
        gaussian(1, 4, 1, 32), gaussian(1, 1, 70, 32), mask, 0.05, torch.zeros(4)
    )
    assert torch.equal(found, torch.zeros(1, 4, 1, 32))


@pytest.fixture
def pair() -> tuple[Any, Any]:
    """(transformers' own DeepSeek V4, the same with the kernel), random dense weights, bfloat16."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING["deepseek_v4"](
        vocab_size=64, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
        head_dim=64, q_lora_rank=32, o_groups=2, o_lora_rank=16, n_routed_experts=4, n_shared_experts=1,
        num_experts_per_tok=2, index_n_heads=4, index_head_dim=32, index_topk=4, sliding_window=16,
        max_position_embeddings=512,
        layer_types=["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
        compress_rates={"heavily_compressed_attention": 8, "compressed_sparse_attention": 4},
    )  # fmt: skip
    own = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    native_one = copy.deepcopy(own)
    shared_keys.adapt_shared_keys(native_one)
    layers = native_one.model.layers
    assert all(isinstance(layer.self_attn, shared_keys.SharedKeyAttention) for layer in layers)
    return own, native_one


def test_the_model_predicts_the_same(pair: tuple[Any, Any]) -> None:
    """A prompt and 20 steps: the window is full and compressed tokens are chosen at the end."""
    ids = torch.randint(0, 64, (2, 50), generator=torch.Generator().manual_seed(1))
    found = []
    for model in pair:
        logits, cache = [], None
        with torch.inference_mode():
            for begin, end in ((0, 30), *((i, i + 1) for i in range(30, 50))):
                out = model(ids[:, begin:end], use_cache=True, **{cache_keyword(model): cache})
                cache = out[cache_keyword(model)]
                logits.append(out.logits.float().log_softmax(-1))
        found.append(torch.cat(logits, 1))
    kl = (found[0].exp() * (found[0] - found[1])).sum(-1)
    assert float(kl.mean()) < 1e-4


def test_attention_weights_and_gradients_come_from_transformers(pair: tuple[Any, Any]) -> None:
    ids = torch.randint(0, 64, (1, 9), generator=torch.Generator().manual_seed(1))
    expected, found = (model(ids, output_attentions=True) for model in pair)
    assert all(torch.equal(a, b) for a, b in zip(expected.attentions, found.attentions, strict=True))
    found.logits.sum().backward()
    assert pair[1].model.layers[0].self_attn.sinks.grad is not None


def test_many_queries_are_left_to_transformers(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_keys, "BIAS_BYTES", 0)
    ids = torch.randint(0, 64, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected, found = (model(ids).logits for model in pair)
    assert torch.equal(expected, found)
