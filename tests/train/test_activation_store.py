"""The activation store: bytes, gradient errors, what stays exact, offloading, and kept routes. Tiny models."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from ciuic_cli.codecs.blockcode.code import BlockCode, encode
from ciuic_cli.errors import EnvironmentFault
from ciuic_cli.train.loss import chunked_loss
from ciuic_cli.train.memory.activations import ActivationStore, default_policy
from ciuic_cli.train.memory.offload import FileOffload
from ciuic_cli.train.memory.routing import keep_choices


@pytest.fixture(scope="module")
def moe(tiny_checkpoint: Callable[..., Path]) -> Any:
    from transformers import AutoModelForCausalLM

    folder = tiny_checkpoint("deepseek_v3", hidden_size=64, moe_intermediate_size=64)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 250, (2, 64), generator=torch.Generator().manual_seed(0))


def gradient(
    model: Any, ids: torch.Tensor, store: ActivationStore | None = None, **others: torch.Tensor
) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    with nullcontext() if store is None else store:
        loss = chunked_loss(model, {"input_ids": ids, **others}, ids)
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def test_the_store_takes_a_quarter_and_changes_gradients_little(moe: Any, ids: torch.Tensor) -> None:
    exact = gradient(moe, ids)
    keeps_all = ActivationStore(moe, policy=lambda module, tensor: None)
    assert torch.equal(gradient(moe, ids, keeps_all), exact)
    store = ActivationStore(moe)
    assert 0 < relative_error(gradient(moe, ids, store), exact) < 0.02
    assert store.original_bytes == keeps_all.original_bytes == keeps_all.stored_bytes
    assert (
        store.peak_bytes == store.stored_bytes < 0.4 * store.original_bytes
    )  # a tiny model has many small tensors
    gc.collect()
    assert store.live_bytes == 0, "the backward pass freed what was stored"
    statistics = ActivationStore(moe, policy=lambda m, t: BlockCode() if t.is_floating_point() else None)
    assert relative_error(gradient(moe, ids, statistics), exact) > 0.02, "exact statistics matter"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "mistral", "deepseek_v3"])
def test_masks_of_packed_rows_and_sliding_windows_stay_exact(
    tiny_checkpoint: Callable[..., Path], ids: torch.Tensor, family: str, attention: str
) -> None:
    """Masks are infinite where they hide a token. The windows, 16 tokens, are masks of rows with one example, too."""
    from transformers import AutoModelForCausalLM

    folder = tiny_checkpoint(family)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention
    ).train()
    for lengths in ((64,), (20, 30, 14)):
        positions = torch.cat([torch.arange(length) for length in lengths]).repeat(2, 1)
        exact = gradient(model, ids, position_ids=positions)
        found = gradient(model, ids, ActivationStore(model), position_ids=positions)
        assert 0 < relative_error(found, exact) < 0.02


def test_layers_save_one_mask(tiny_checkpoint: Callable[..., Path], ids: torch.Tensor) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        tiny_checkpoint("llama", num_hidden_layers=4), dtype=torch.float32
    ).train()
    positions = torch.cat([torch.arange(length) for length in (20, 30, 14)]).repeat(2, 1)
    exact = gradient(model, ids, position_ids=positions)
    store = ActivationStore(model, policy=lambda module, tensor: None)
    for _ in range(2):
        store.reset()
        assert torch.equal(gradient(model, ids, store, position_ids=positions), exact)
        assert store.original_bytes - store.stored_bytes == 3 * 2 * 64 * 64 * 4


def test_in_a_file_the_gradients_are_the_same(moe: Any, ids: torch.Tensor, tmp_path: Path) -> None:
    wanted = gradient(moe, ids, ActivationStore(moe))
    offload = FileOffload(tmp_path)
    store = ActivationStore(moe, offload=offload)
    for _ in range(2):
        assert torch.equal(gradient(moe, ids, store), wanted)
    gc.collect()
    assert not offload._entries and list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    offload = FileOffload(tmp_path)
    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(EnvironmentFault, match="No space left"):
        offload.put(encode(torch.ones(100), BlockCode()))


def test_a_tensor_is_stored_once_and_weights_never() -> None:
    linears = torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(3))
    x = torch.randn(64, 64, requires_grad=True)
    store = ActivationStore(linears)
    with store:
        y = x * 1.0
        total = sum(linear(y).sum() for linear in linears)
        changed = y.detach().clone().requires_grad_()
        first = changed.clone()
        kept = first * first.T  # both are views of one memory
    assert store.original_bytes == 2 * x.nbytes
    with torch.no_grad():
        x.mul_(3)
    total.backward()
    kept.sum().backward()
    exact = torch.cat([torch.ones(64, 64).T @ changed.detach() for _ in range(3)])
    assert relative_error(torch.cat([linear.weight.grad for linear in linears]), exact) < 0.01
    assert relative_error(changed.grad, 2 * changed.detach().T) < 0.01


def test_a_changed_tensor_is_another_tensor() -> None:
    """The memory of a tensor that died is used again by the next one, and in-place operations change a living one."""
    store = ActivationStore(torch.nn.Module(), policy=lambda module, tensor: BlockCode())
    leaf = torch.ones(2048, requires_grad=True)
    terms = []
    with store:
        buffer = torch.ones(2048)
        for factor in (1.0, 2.0, 3.0):
            buffer.fill_(factor)
            terms.append((leaf * buffer).sum())
        for factor in (4.0, 5.0):
            terms.append((leaf * torch.full((2048,), factor)).sum())
    for term, factor in zip(terms, (1, 2, 3, 4, 5), strict=True):
        (found,) = torch.autograd.grad(term, leaf)
        assert torch.allclose(found, torch.full((2048,), float(factor)), rtol=0.01)


@pytest.mark.parametrize("code", [None, BlockCode()])
@pytest.mark.parametrize("columns", [64, 60])
def test_an_expanded_tensor_is_kept_once(code: BlockCode | None, columns: int) -> None:
    """On a GPU, torch expands masks over all heads. With 60 columns, rows of 64 are kept in part."""
    wide = torch.randn(2, 1, 32, 64, generator=torch.Generator().manual_seed(0))
    once = wide[..., :columns]
    heads, leaf = once.expand(2, 8, 32, columns), torch.ones(2, 8, 32, columns, requires_grad=True)
    store = ActivationStore(torch.nn.Module(), policy=lambda module, tensor: code)
    with store:
        product = leaf * heads
        again = leaf * once
    size = 4 * once.numel()
    assert store.original_bytes == size
    assert store.stored_bytes == (size if code is None else code.nbytes(once.numel()))
    for result in (product, again):
        (found,) = torch.autograd.grad(result.sum(), leaf)
        assert torch.equal(found, heads) if code is None else relative_error(found, heads) < 0.01


def test_what_stays_exact() -> None:
    class SomeAttention(torch.nn.Module):
        pass

    attention, linear = SomeAttention(), torch.nn.Linear(2, 2)
    assert default_policy(attention, torch.zeros(2, 4, 512)) is None
    assert default_policy(attention, torch.zeros(2, 4, 512, 64, requires_grad=True)) is not None
    assert default_policy(attention, torch.zeros(2, 1, 512, 512)) is None, "a mask has no gradient"
    assert default_policy(linear, torch.zeros(2, 1, 512, 512)) is None
    assert default_policy(linear, torch.zeros(2, 512, 64)) is not None
    assert default_policy(linear, torch.zeros(2, 2048, 1)) is None
    assert default_policy(linear, torch.zeros(4096, dtype=torch.int64)) is None
    assert default_policy(None, torch.zeros(100)) is None


@pytest.mark.parametrize("keeps", [True, False])
def test_checkpointed_layers_keep_their_routes(moe: Any, keeps: bool) -> None:
    """Layers are computed again from inputs in 4 bits, so that routes would change without the kept choices."""
    seen: list[list[torch.Tensor]] = []
    for name, module in moe.named_modules():
        if name.endswith(".experts"):
            calls: list[torch.Tensor] = []
            seen.append(calls)
            module.register_forward_pre_hook(lambda m, inputs, calls=calls: calls.append(inputs[1].clone()))
    ids = torch.randint(0, 250, (2, 64), generator=torch.Generator().manual_seed(1))
    moe.gradient_checkpointing_enable(
        {"use_reentrant": False, **({"context_fn": keep_choices} if keeps else {})}
    )
    coarse = BlockCode(bits=4)
    store = ActivationStore(moe, lambda m, t: coarse if default_policy(m, t) else None)
    gradient(moe, ids, store)
    moe.gradient_checkpointing_disable()
    assert seen and all(len(calls) == 2 for calls in seen)
    assert all(torch.equal(*calls) for calls in seen) == keeps
