"""The native scores of indexers: float64's numbers, and the tokens that transformers' own modules choose."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, DynamicCache
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4IndexerScorer
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

from ciuic_cli.errors import UsageError
from ciuic_cli.runtime.attention import indexer


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("b", "s", "heads", "columns", "tokens"),
    [(1, 1, 64, 128, 300), (2, 3, 5, 32, 77), (1, 20, 9, 64, 1), (3, 1, 1, 2, 16), (1, 1, 8, 512, 129)],
)
def test_scores(b: int, s: int, heads: int, columns: int, tokens: int) -> None:
    queries, weights = gaussian(b, s, heads, columns), torch.randn(b, s, heads)
    keys = gaussian(b, tokens + 9, columns)[:, :tokens]  # a view of a longer cache
    assert indexer.fits(queries, keys)
    products = torch.einsum("bshc,btc->bsht", queries.double(), keys.double()).relu()
    expected = (products * weights.double()[..., None]).sum(2)
    found = indexer.scores(queries, keys, weights)
    assert float((found - expected).norm()) < 1e-6 * float(expected.norm())


def test_scores_do_not_depend_on_threads_or_on_other_rows() -> None:
    queries, keys, weights = gaussian(1, 33, 6, 64), gaussian(1, 500, 64), torch.randn(1, 33, 6)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = indexer.scores(queries, keys, weights)
        torch.set_num_threads(3)
        assert torch.equal(indexer.scores(queries, keys, weights), alone)
    finally:
        torch.set_num_threads(threads)
    last = indexer.scores(queries[:, 32:].contiguous(), keys, weights[:, 32:].contiguous())
    assert torch.equal(last, alone[:, 32:])


def test_the_largest_numbers() -> None:
    numbers = torch.randn(3, 4, 1000, generator=torch.Generator().manual_seed(0))
    numbers[0, 0, :600] = float("-inf")
    numbers[0, 1] = 0.0
    numbers[0, 2, 5] = float("nan")
    numbers[0, 3] = (numbers[0, 3] * 8).round()  # many equal numbers
    for k in (1, 7, 500, 1000):
        found = indexer.largest(numbers, k)
        assert found.shape == (3, 4, k)
        assert bool((found.diff(dim=-1) > 0).all())
        for row, chosen in zip(numbers.flatten(0, 1), found.flatten(0, 1), strict=True):
            stable = torch.sort(row, descending=True, stable=True).indices  # NaN first
            assert set(stable[:k].tolist()) == set(chosen.tolist())


def test_impossible_calls_are_refused() -> None:
    with pytest.raises(UsageError, match="choice of an indexer's tokens"):
        indexer.largest(torch.randn(2, 5), 6)
    assert not indexer.fits(gaussian(1, 1, 4, 64).float(), gaussian(1, 9, 64))
    assert not indexer.fits(gaussian(1, 1, 4, 514), gaussian(1, 9, 514))
    assert not indexer.fits(gaussian(1, 1, 4, 64), gaussian(1, 0, 64))
    with pytest.raises(UsageError, match="scores of an indexer"):
        indexer.scores(gaussian(1, 1, 4, 514), gaussian(1, 9, 514), torch.randn(1, 1, 4))


@pytest.fixture
def pair() -> tuple[Any, Any]:
    """(transformers' own indexer of DeepSeek V3.2, the same with native scores), bfloat16."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING["deepseek_v32"](
        hidden_size=64, q_lora_rank=48, qk_rope_head_dim=16, index_head_dim=32, index_n_heads=6, index_topk=8
    )
    own = DeepseekV32Indexer(config, 0).to(torch.bfloat16).eval()
    native = copy.deepcopy(own)
    indexer.adapt_indexers(native)
    assert isinstance(native, indexer.NativeIndexer)
    return own, native


def arguments(b: int, s: int, before: int) -> tuple[Any, ...]:
    """Hidden states, queries' residual, position embeddings and a causal mask for s tokens behind `before` others."""
    angles = torch.arange(before, before + s)[:, None] * torch.logspace(0, -3, 8)
    turned = torch.cat([angles, angles], -1).expand(b, -1, -1)
    seen = torch.arange(before + s) <= torch.arange(before, before + s)[:, None]
    embeddings = (turned.cos().to(torch.bfloat16), turned.sin().to(torch.bfloat16))
    return gaussian(b, s, 64), gaussian(b, s, 48), embeddings, seen.expand(b, -1, -1), None


def seen_tokens(chosen: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Which tokens are chosen and not hidden: bool, as the mask."""
    floating = mask.dtype != torch.bool
    picked = torch.zeros(mask.shape, dtype=torch.bool).scatter(-1, chosen.long(), True)
    return picked & (mask == 0 if floating else mask)


@pytest.mark.parametrize("floating", [False, True])
def test_deepseek_v32_chooses_the_same_tokens(pair: tuple[Any, Any], floating: bool) -> None:
    caches = [DynamicCache(config=pair[0].config) for _ in pair]
    for s, before in ((20, 0), (1, 20), (1, 21), (3, 22)):
        given = list(arguments(2, s, before))
        if floating:
            given[3] = torch.zeros(given[3].shape).masked_fill(~given[3], torch.finfo(torch.bfloat16).min)
        with torch.inference_mode():
            own, native = (module(*given, cache=cache) for module, cache in zip(pair, caches, strict=True))
        assert native.dtype == torch.int32
        assert torch.equal(seen_tokens(own, given[3]), seen_tokens(native, given[3]))


def test_other_dtypes_are_left_to_transformers(pair: tuple[Any, Any]) -> None:
    given = [
        x.float() if isinstance(x, torch.Tensor) and x.dtype != torch.bool else x for x in arguments(1, 9, 0)
    ]
    given[2] = tuple(x.float() for x in given[2])
    with torch.inference_mode():
        own, native = (module.float()(*given) for module in pair)
    assert torch.equal(own, native)


def test_copies_and_pickles_stay_native(pair: tuple[Any, Any]) -> None:
    for again in (copy.deepcopy(pair[1]), pickle.loads(pickle.dumps(pair[1]))):
        assert isinstance(again, indexer.NativeIndexer)
    kind = type(pair[1])
    indexer.adapt_indexers(pair[1])
    assert type(pair[1]) is kind


def test_deepseek_v4_scores() -> None:
    torch.manual_seed(0)
    config = CONFIG_MAPPING["deepseek_v4"](hidden_size=64, index_head_dim=32, index_n_heads=6)
    own = DeepseekV4IndexerScorer(config).to(torch.bfloat16).eval()
    native = copy.deepcopy(own)
    indexer.adapt_indexers(native)
    given = gaussian(2, 3, 6, 32), gaussian(2, 40, 32), gaussian(2, 3, 64)
    with torch.inference_mode():
        expected, found = own(*given), native(*given)
    assert float((expected - found).norm()) < 1e-6 * float(expected.norm())
    with torch.inference_mode():  # no compressed token yet
        assert native(given[0], given[1][:, :0], given[2]).shape == (2, 3, 0)
