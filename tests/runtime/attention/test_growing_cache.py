"""Cache layers that grow in place give what transformers' layers give."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache, DynamicIndexedLayer, DynamicLayer

from ciuic_cli.runtime.attention.growing_cache import GrowingIndexedLayer, GrowingLayer, let_grow


def tokens(count: int, seed: int, b: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(b, 1, count, 8, generator=generator), torch.randn(b, 1, count, 4, generator=generator)


def same(layer: Any, expected: Any) -> bool:
    return torch.equal(layer.keys, expected.keys) and torch.equal(layer.values, expected.values)


def test_as_the_original_through_every_change() -> None:
    growing, original = GrowingLayer(), DynamicLayer()
    actions = [
        lambda layer: layer.update(*tokens(5, 1)),
        *[lambda layer, i=i: layer.update(*tokens(1, i)) for i in range(2, 90)],
        lambda layer: layer.crop(-7),
        lambda layer: layer.update(*tokens(3, 90)),
        lambda layer: layer.reorder_cache(torch.tensor([1, 0])),
        lambda layer: layer.update(*tokens(1, 91)),
        lambda layer: layer.batch_repeat_interleave(2),
        lambda layer: layer.update(*tokens(1, 92, b=4)),
        lambda layer: layer.batch_select_indices(torch.tensor([3, 1, 0])),
        lambda layer: layer.update(*tokens(130, 93, b=3)),
        lambda layer: layer.reset(),
        lambda layer: layer.update(*tokens(2, 94)),
    ]
    for action in actions:
        action(growing)
        action(original)
        if original.is_initialized:
            assert same(growing, original)


def test_a_step_writes_behind_the_cached_tokens() -> None:
    layer = GrowingLayer()
    layer.update(*tokens(100, 1))
    begin = layer.keys.data_ptr()
    for step in range(50):
        layer.update(*tokens(1, step))
        assert layer.keys.data_ptr() == begin


def test_a_copy_goes_its_own_way() -> None:
    layer = GrowingLayer()
    layer.update(*tokens(6, 1))
    other = copy.deepcopy(layer)
    layer.update(*tokens(1, 2))
    other.update(*tokens(1, 3))
    assert torch.equal(layer.keys[:, :, -1:], tokens(1, 2)[0])
    assert torch.equal(other.keys[:, :, -1:], tokens(1, 3)[0])


def test_gradients_flow_through_a_cache() -> None:
    layer = GrowingLayer()
    keys, values = tokens(3, 1)
    layer.update(keys.requires_grad_(), values)
    layer.update(*tokens(1, 2))
    layer.keys.sum().backward()
    assert torch.equal(keys.grad, torch.ones_like(keys))


def test_inference_mode_and_its_end() -> None:
    layer = GrowingLayer()
    with torch.inference_mode():
        layer.update(*tokens(3, 1))
    with torch.no_grad():
        layer.update(*tokens(1, 2))
    assert torch.equal(layer.keys, torch.cat([tokens(3, 1)[0], tokens(1, 2)[0]], dim=2))


def test_keys_of_an_indexer() -> None:
    growing, original = GrowingIndexedLayer(), DynamicIndexedLayer()
    for seed in range(80):
        keys = torch.randn(2, 1 + seed % 3, 8, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(growing.update_indexer(keys), original.update_indexer(keys))


@pytest.mark.parametrize("kind", [DynamicLayer, DynamicIndexedLayer])
def test_only_the_dynamic_layers_are_changed(kind: Any) -> None:
    cache = DynamicCache()
    cache.layers.append(kind())
    let_grow(cache, 0)
    let_grow(cache, 1)  # not there yet
    assert type(cache.layers[0]) in (GrowingLayer, GrowingIndexedLayer)
    changed = type(cache.layers[0])
    let_grow(cache, 0)
    assert type(cache.layers[0]) is changed
