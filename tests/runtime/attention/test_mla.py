"""MLA over cached latents: the same numbers as the dense model that expands its context, in every way of generating."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from packed_weights import pack, relative_error
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from ciuic_cli.codecs import trellis
from ciuic_cli.evaluation.bench_process import cache_keyword
from ciuic_cli.runtime import ops
from ciuic_cli.runtime.attention import mla, mla_products
from ciuic_cli.runtime.attention.mla import LatentAttention
from ciuic_cli.runtime.matrices import CpuMatrix

FAMILIES = ("deepseek_v2", "deepseek_v3", "deepseek_v32")


@pytest.fixture
def always_absorbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_products, "absorbing_is_cheaper", lambda *_, **__: True)


@pytest.fixture
def never_absorbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_products, "absorbing_is_cheaper", lambda *_, **__: False)


def random_attention(
    seed: int = 0,
    *,
    queries: int = 3,
    context: int = 40,
    rank: int = 24,
    lowrank: int = 5,
    scaled: bool = False,
) -> dict[str, Any]:
    """Arguments of `mla_products.attention` for 2 sequences and 4 heads, and `kv_b_proj` as a dense matrix."""
    g = torch.Generator().manual_seed(seed)
    nope, rope, v, heads = 16, 8, 12, 4
    packed = pack(
        torch.randn(heads * (nope + v), rank, generator=g), [4, 2, 6, 8], rank=lowrank, is_sorted=True, seed=3
    )
    if scaled:
        packed = copy.copy(packed)
        object.__setattr__(
            packed, "input_scale", torch.randint(100, 150, (rank,), generator=g, dtype=torch.uint8).numpy()
        )
    matrix = CpuMatrix(packed)
    up = mla_products.UpProjection.of(matrix, mla_products.HeadShape(heads, nope, torch.float32))
    return {
        "up": up,
        "dense": trellis.decode_dense(packed),
        "query": torch.randn(2, heads, queries, nope + rope, generator=g),
        "latents": torch.randn(2, 1, context, rank, generator=g),
        "rotary_keys": torch.randn(2, 1, context, rope, generator=g),
        "scaling": (nope + rope) ** -0.5,
    }


def inputs_of(case: dict[str, Any], mask: torch.Tensor | None) -> mla_products.AttentionInputs:
    return mla_products.AttentionInputs(
        case["query"], case["latents"], case["rotary_keys"], mask, case["scaling"]
    )


def reference(case: dict[str, Any], mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with everything expanded, in float64: (result, weights)."""
    up, query = case["up"], case["query"].double()
    heads = query.shape[1]
    latents, rope = case["latents"].double(), case["rotary_keys"].double()
    rows = case["dense"].double().view(heads, -1, latents.shape[-1])
    both = torch.einsum("bzcr,hnr->bhcn", latents, rows)
    key = torch.cat([both[..., : up.nope], rope.expand(-1, heads, -1, -1)], dim=-1)
    scores = query @ key.mT * case["scaling"]
    if mask is not None:
        scores = scores.masked_fill(~mask, -1e30) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1)
    return weights @ both[..., up.nope :], weights


def some_mask(queries: int, context: int, kind: str) -> torch.Tensor | None:
    if kind == "none":
        return None
    seen = torch.ones(queries, context, dtype=torch.bool).tril(context - queries)
    seen = seen.expand(2, 1, -1, -1).clone()
    seen[1, :, :, :5] = False  # padding of the second sequence
    return seen if kind == "bool" else torch.where(seen, 0.0, -1e9)


@pytest.mark.parametrize("kind", ["none", "bool", "float"])
@pytest.mark.parametrize("scaled", [False, True])
def test_both_ways_are_attention(kind: str, scaled: bool) -> None:
    case = random_attention(scaled=scaled, lowrank=0 if scaled else 5)
    mask = some_mask(3, 40, kind)
    expected, weights = reference(case, mask)
    up = case["up"]
    absorbed = mla_products.absorbed_attention(up, inputs_of(case, mask))
    expanded = mla_products.expanded_attention(up, inputs_of(case, mask), is_causal=False)
    found, found_weights = mla_products.absorbed_attention_weights(up, inputs_of(case, mask))
    for result in (absorbed, expanded, found):
        assert result.shape == expected.shape and result.dtype == torch.float32
        assert relative_error(result, expected) < 1e-5
    assert (found_weights - weights).abs().max() < 1e-5


def test_heads_are_expanded_in_groups_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_attention(queries=40)
    up = case["up"]
    whole = mla_products.expanded_attention(up, inputs_of(case, None), is_causal=True)
    expected, _ = reference(case, torch.ones(40, 40, dtype=torch.bool).tril())
    assert relative_error(whole, expected) < 1e-5
    groups = []
    expand = mla_products.UpProjection.expand

    def counted(self: Any, latents: torch.Tensor, begin: int, end: int) -> Any:
        groups.append(end - begin)
        return expand(self, latents, begin, end)

    monkeypatch.setattr(mla_products.UpProjection, "expand", counted)
    monkeypatch.setattr(mla_products, "EXPANDED_BYTES", 2 * 3 * 40 * (16 + 12 + 2 * 24) * 4)
    assert torch.equal(mla_products.expanded_attention(up, inputs_of(case, None), is_causal=True), whole)
    assert groups == [3, 1]


def test_which_way_multiplies_less() -> None:
    v3 = {"rank": 512, "nope": 128, "rope": 64, "v": 128}
    assert mla_products.absorbing_is_cheaper(1, 64, **v3)
    assert mla_products.absorbing_is_cheaper(1, 100_000, **v3)
    assert mla_products.absorbing_is_cheaper(
        100, 4096, **v3
    )  # a chunk of a prompt, or a draft to be verified
    assert not mla_products.absorbing_is_cheaper(512, 512, **v3)
    assert not mla_products.absorbing_is_cheaper(2048, 8192, **v3)


def test_a_query_whose_tokens_are_all_hidden_stays_finite() -> None:
    case = random_attention()
    up = case["up"]
    mask = torch.zeros(2, 1, 3, 40, dtype=torch.bool)
    assert mla_products.absorbed_attention(up, inputs_of(case, mask)).isfinite().all()


@pytest.fixture
def pair(artifact: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """`pair(family, **options)`: the dense model with the decoded weights, and the artifact's, float32."""

    def make(family: str, **options: Any) -> tuple[Any, Any]:
        made = artifact(family, rank=5)
        model = AutoModelForCausalLM.from_pretrained(made.folder, dtype=torch.float32, **options)
        return made.dense_model(**options), model.eval()

    return make


@torch.inference_mode()
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_a_padded_batch(
    family: str, implementation: str, pair: Callable[..., tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, model = pair(family, attn_implementation=implementation)
    assert all(isinstance(layer.self_attn, LatentAttention) for layer in model.model.layers)
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(2, 21, dtype=torch.long)
    mask[0, :6] = 0
    caches = [{cache_keyword(m): DynamicCache(config=m.config)} for m in (dense, model)]
    for tokens in (21, 1, 1, 5, 1):  # the prompt, single tokens, and a few at once as a draft is verified
        ids = torch.randint(3, 260, (2, tokens), generator=generator)
        if tokens < 21:
            mask = F.pad(mask, (0, tokens), value=1)
        outputs = [
            m(ids, attention_mask=mask, **cache) for m, cache in zip((dense, model), caches, strict=True)
        ]
        seen = mask[:, -tokens:].bool()
        assert relative_error(outputs[1].logits[seen], outputs[0].logits[seen]) < 5e-5
    with monkeypatch.context() as patch:  # the expanded context is not touched while decoding

        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("the context was expanded")

        patch.setattr(mla_products, "expanded_attention", refuse)
        patch.setattr(mla, "_expanded_by_transformers", refuse)
        model(ids[:, :1], attention_mask=F.pad(mask, (0, 1), value=1), **caches[1])


@torch.inference_mode()
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3},
        {"cache_implementation": "static"},
        {"prompt_lookup_num_tokens": 4},
        {"prefill_chunk_size": 8},
    ],
    ids=lambda options: next(iter(options), "greedy"),
)
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_generate(
    family: str, options: dict[str, Any], pair: Callable[..., tuple[Any, Any]], prompt: torch.Tensor
) -> None:
    if "prompt_lookup_num_tokens" in options:
        prompt = prompt[:1]
    texts = [m.generate(prompt, max_new_tokens=12, do_sample=False, **options) for m in pair(family)]
    assert torch.equal(*texts)


@torch.inference_mode()
def test_static_cache_by_hand(pair: Callable[..., tuple[Any, Any]], prompt: torch.Tensor) -> None:
    dense, model = pair("deepseek_v3")
    found = []
    for m in (dense, model):
        cache = {cache_keyword(m): StaticCache(config=m.config, max_cache_len=64)}
        m(prompt, **cache)
        found.append(m(prompt[:, :1], **cache).logits)
    assert relative_error(found[1], found[0]) < 5e-5


@torch.inference_mode()
def test_attention_weights_of_eager(pair: Callable[..., tuple[Any, Any]], prompt: torch.Tensor) -> None:
    outputs = [m(prompt, output_attentions=True) for m in pair("deepseek_v3", attn_implementation="eager")]
    for expected, found in zip(outputs[0].attentions, outputs[1].attentions, strict=True):
        assert found.shape == expected.shape == (2, 4, 21, 21)
        assert (found - expected).abs().max() < 2e-3


@torch.inference_mode()
@pytest.mark.usefixtures("always_absorbed")
@pytest.mark.parametrize("wrapped", ["hook", "adapter"])
def test_whatever_wraps_the_projection_counts(
    wrapped: str, pair: Callable[..., tuple[Any, Any]], prompt: torch.Tensor
) -> None:
    """A hook (offloading) or a module around `kv_b_proj` (an adapter) changes its output; so must attention."""
    dense, model = pair("deepseek_v3")

    class Doubled(torch.nn.Module):
        def __init__(self, base: torch.nn.Module) -> None:
            super().__init__()
            self.base = base

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * self.base(x)

    for m in (dense, model):
        attention = m.model.layers[1].self_attn
        if wrapped == "hook":
            attention.kv_b_proj.register_forward_hook(lambda _module, _args, output: 2 * output)
        else:
            attention.kv_b_proj = Doubled(attention.kv_b_proj)
    logits = [m(prompt).logits for m in (dense, model)]
    assert relative_error(logits[1], logits[0]) < 5e-5


def test_gradients_pass_through(pair: Callable[..., tuple[Any, Any]], prompt: torch.Tensor) -> None:
    grads = []
    for m in pair("deepseek_v3"):
        x = torch.randn(2, 9, 56, generator=torch.Generator().manual_seed(2), requires_grad=True)
        m(inputs_embeds=x).logits.square().sum().backward()
        grads.append(x.grad)
    assert relative_error(grads[1], grads[0]) < 5e-4


@torch.inference_mode()
def test_copies_and_pickles(pair: Callable[..., tuple[Any, Any]], prompt: torch.Tensor) -> None:
    _, model = pair("deepseek_v3")
    expected = model(prompt).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(other.model.layers[0].self_attn, LatentAttention)
        assert torch.equal(other(prompt).logits, expected)


@torch.inference_mode()
def test_rows_stay_decoded_where_that_costs_little(
    artifact: Callable[..., Any], prompt: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = artifact("deepseek_v3", rank=5).folder
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    projections = [layer.self_attn.kv_b_proj for layer in model.model.layers]
    assert all(projection.decoded is None for projection in projections)  # a large share of a tiny model
    expected = model(prompt).logits
    monkeypatch.setattr(mla, "DECODED_SHARE", 1.0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    kept = [layer.self_attn.kv_b_proj.decoded for layer in model.model.layers]
    assert [tensor.shape for tensor in kept] == 3 * [(4 * (16 + 12), 32)]
    assert torch.equal(model(prompt).logits, expected)
    assert not [name for name in model.state_dict() if name.endswith("decoded")]


@torch.inference_mode()
def test_implementation_changed_after_loading(
    pair: Callable[..., tuple[Any, Any]], prompt: torch.Tensor
) -> None:
    _, model = pair("deepseek_v3")
    model.set_attn_implementation("eager")
    assert model(prompt, output_attentions=True).attentions[0] is not None
    assert model.model.layers[0].self_attn.config.implementation_of_model == "eager"


@torch.inference_mode()
def test_terms_that_are_not_computed_here_reach_transformers(
    pair: Callable[..., tuple[Any, Any]], prompt: torch.Tensor
) -> None:
    """A bias of the scores, with an indexer's choice of tokens beside it."""
    logits = []
    for m in pair("deepseek_v32"):
        bias = torch.randn(1, 4, 21, 21, generator=torch.Generator().manual_seed(0))
        logits.append(m(prompt, position_bias=bias).logits)
    assert relative_error(logits[1], logits[0]) < 5e-5
    assert relative_error(logits[1], pair("deepseek_v32")[1](prompt).logits) > 1e-2


def test_operator_is_registered() -> None:
    case = random_attention(lowrank=0)
    packed = pack(torch.randn(4 * 28, 24, generator=torch.Generator().manual_seed(0)), 4)
    blob = torch.frombuffer(bytearray(packed.to_bytes()), dtype=torch.uint8)
    arguments = (
        *(case[name] for name in ("query", "latents", "rotary_keys")),
        *(None, blob, None, 16, 12, 0.2, False),
    )
    torch.library.opcheck(torch.ops.ciuic.latent_attention.default, arguments)
    inputs = mla_products.AttentionInputs(*arguments[:4], scaling=0.2)
    direct = ops.latent_attention(inputs, blob, None, nope=16, v=12, is_causal=False)
    assert torch.equal(direct, torch.ops.ciuic.latent_attention(*arguments))
