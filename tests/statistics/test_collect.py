"""Statistics of the layer-by-layer sweeps against a backward pass through the whole model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import VOCABULARY
from transformers import AutoModelForCausalLM

from ciuic_cli.allocation.matrices import TOKEN_WEIGHT_EXPONENT, fisher_of, weight_matrices
from ciuic_cli.checkpoint.model_map import map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.layerwise import logits as layer_logits
from ciuic_cli.statistics import collect, moments, sums
from ciuic_cli.statistics.collect import collect_statistics
from ciuic_cli.statistics.embedding_fisher import PRIOR_OCCURRENCES
from ciuic_cli.statistics.files import CONTEXTS, INDEX, Statistics
from ciuic_cli.statistics.head_fisher import sequence_seed
from ciuic_cli.statistics.predictions import sampled_gradient


def _silent(what: str, done: int, total: int) -> None:
    del what, done, total


@pytest.fixture(autouse=True)
def _in_float32_in_parts_and_one_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of 24 tokens go through the head in three parts; the references take them whole. The text is one
    segment, so that nothing is shrunk (test_few_tokens.py)."""
    monkeypatch.setattr(sums, "SEGMENTS", 1)
    monkeypatch.setattr(collect, "compute_dtype", lambda device: torch.float32)
    monkeypatch.setattr(layer_logits, "LEAST_TOKENS", 1)
    monkeypatch.setattr(layer_logits, "LOGIT_BYTES", 10 * 4 * 256)


def _collect(checkpoint: Path, folder: Path, batches: torch.Tensor, **options: Any) -> Statistics:
    folder.mkdir()
    model_map = map_model(open_checkpoint(checkpoint))
    return collect_statistics(
        model_map, batches, folder, device=torch.device("cpu"), seed=0, progress=_silent, **options
    )


def _batches(sequences: int = 3, length: int = 24) -> torch.Tensor:
    return torch.randint(0, 256, (sequences, length), generator=torch.Generator().manual_seed(1))


def _draws(tokens: int, generator: torch.Generator) -> torch.Tensor:
    return torch.rand((tokens, 1), generator=generator)


def _reference(
    checkpoint: Path,
    batches: torch.Tensor,
    name: str,
    roots: Sequence[float] = (1.0, 1.0, 1.0),
    numbers: Sequence[int] = range(9),
) -> tuple[torch.Tensor, torch.Tensor]:
    """H and G of one linear from a full forward and backward pass, with the same sampled labels.

    roots: of the sequences' weights; they multiply gradients. numbers: of the sequences in the whole text.
    """
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    module = model.get_submodule(name.removesuffix(".weight"))
    x_parts, g_parts = [], []
    module.register_forward_hook(lambda m, args, out: x_parts.append(args[0].detach()))
    module.register_full_backward_hook(lambda m, gin, gout: g_parts.append(gout[0].detach()))
    generator = torch.Generator()
    for row, root, number in zip(batches, roots, numbers, strict=False):
        generator.manual_seed(sequence_seed(0, number))
        logits = model(input_ids=row[None]).logits[0]
        logits.backward(root * sampled_gradient(logits.detach().softmax(-1), _draws(len(row), generator)))
    x, g = (torch.cat([part.flatten(0, -2) for part in parts]) for parts in (x_parts, g_parts))
    return _moments(x, g, torch.tensor(roots).repeat_interleave(len(x) // len(roots))[:, None])


def _sums(
    x: torch.Tensor, g: torch.Tensor, roots: torch.Tensor | float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """Sums for H and G from the inputs and gradients (t, ·) of tokens, and their losses without and with weights.

    Each token's g xᵀ is divided by the root of its norm in G, and x by the root of its norm in H. Every fourth token
    counts in G if it has more outputs. roots (t, 1): of the tokens' weights, which the gradients have already.
    """
    x_norm = x.norm(dim=1, keepdim=True)
    norm = x_norm * g.norm(dim=1, keepdim=True)
    vectors = g / norm.sqrt() * x_norm
    if g.shape[1] > x.shape[1]:
        vectors = vectors[3::4]
    limited = norm.clamp(max=moments.OUTLIER_LIMIT * float(norm.mean()))
    h = (roots * x / x_norm).T @ x
    return h, vectors.T @ vectors, float(limited.square().sum()), float(norm.sum())


def _moments(x: torch.Tensor, g: torch.Tensor, roots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """H with unit trace, and G per token."""
    h, g_sum, loss, weighted_loss = _sums(x, g, roots)
    share = float(g_sum.trace()) / weighted_loss  # of the tokens in G
    return h / h.trace(), g_sum * loss / (weighted_loss * share * len(x))


def test_gradients_of_sampled_labels_have_the_fisher_information_of_the_prediction() -> None:
    probability = torch.tensor([0.6, 0.0, 0.3, 0.08, 0.02])
    sampled = sampled_gradient(
        probability.repeat(100_000, 1), _draws(100_000, torch.Generator().manual_seed(0))
    )
    expected = probability.diag() - probability.outer(probability)
    torch.testing.assert_close(sampled.T @ sampled / len(sampled), expected, rtol=0, atol=4e-3)
    assert float(sampled.sum(1).abs().max()) < 1e-5  # shifting all logits changes no prediction


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.layers.0.mlp.down_proj.weight"),
        ("llama", "model.layers.2.self_attn.v_proj.weight"),
        ("deepseek_v3", "model.layers.1.self_attn.kv_b_proj.weight"),
        ("deepseek_v3", "model.layers.1.mlp.shared_experts.down_proj.weight"),
    ],
)
def test_moments_equal_a_full_backward_pass(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    family: str,
    name: str,
) -> None:
    checkpoint = tiny_checkpoint(family)
    statistics = _collect(checkpoint, tmp_path / "s", _batches())
    h, g = _reference(checkpoint, _batches(), name)
    found_h, found_g = statistics.input_moment(name), statistics.output_fisher(name)
    assert found_h is not None and found_g is not None
    torch.testing.assert_close(found_h, h, rtol=1e-3, atol=2e-5 * float(h.abs().max()))
    torch.testing.assert_close(found_g, g, rtol=1e-3, atol=1e-4 * float(g.abs().max()))


def test_the_loss_on_a_sequence_counts_as_its_weight_says(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    checkpoint, name = tiny_checkpoint("llama"), "model.layers.0.mlp.down_proj.weight"
    weights = torch.tensor([2.5, 0.4, 0.1])
    statistics = _collect(checkpoint, tmp_path / "s", _batches(), weights=2 * weights)
    h, g = _reference(checkpoint, _batches(), name, roots=weights.sqrt().tolist())
    found_h, found_g = statistics.input_moment(name), statistics.output_fisher(name)
    assert found_h is not None and found_g is not None
    torch.testing.assert_close(found_h, h, rtol=1e-3, atol=2e-5 * float(h.abs().max()))
    torch.testing.assert_close(found_g, g, rtol=1e-3, atol=1e-4 * float(g.abs().max()))


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        ("llama", {}, "lm_head.weight"),
        ("llama", {}, "model.layers.1.self_attn.o_proj.weight"),
        ("gemma3", {"final_logit_softcapping": 0.5}, "model.embed_tokens.weight"),
    ],
)
def test_sequences_without_weight_do_not_count(
    kind: str, options: dict[str, Any], name: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint(kind, **options)
    whole = _collect(checkpoint, tmp_path / "s", _batches(), weights=torch.tensor([1.0, 1.0, 0.0]))
    first = _collect(checkpoint, tmp_path / "first", _batches()[:2])
    torch.testing.assert_close(whole.input_moment(name), first.input_moment(name), rtol=1e-3, atol=1e-6)
    g, g_of_first = whole.output_fisher(name), first.output_fisher(name)
    assert g is not None and g_of_first is not None
    torch.testing.assert_close(g, g_of_first, rtol=1e-3, atol=1e-4 * float(g.abs().max()))
    if "layers" not in name:
        torch.testing.assert_close(whole.contexts(name), first.contexts(name), rtol=0.02, atol=1e-4)


def test_a_grouped_linear_has_the_moments_of_its_groups(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """DeepSeek-V4's o_a_proj: H over all groups' inputs, G block diagonal, one block per group of outputs."""
    checkpoint, name = tiny_checkpoint("deepseek_v4"), "model.layers.1.self_attn.o_a_proj.weight"
    statistics = _collect(checkpoint, tmp_path / "s", _batches())
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    module = model.get_submodule(name.removesuffix(".weight"))
    x_parts, g_parts = [], []
    module.register_forward_hook(lambda m, args, out: x_parts.append(args[0].detach().flatten(0, -3)))
    module.register_full_backward_hook(lambda m, gin, gout: g_parts.append(gout[0].detach().flatten(0, -3)))
    generator = torch.Generator()
    for number, row in enumerate(_batches()):
        generator.manual_seed(sequence_seed(0, number))
        logits = model(input_ids=row[None]).logits[0]
        logits.backward(sampled_gradient(logits.detach().softmax(-1), _draws(len(row), generator)))
    # (tokens, groups, n) and (tokens, groups, m / groups) of each sequence
    count = x_parts[0].shape[1]
    groups = [
        _sums(*(torch.cat([part[:, i] for part in parts]) for parts in (x_parts, g_parts)))
        for i in range(count)
    ]
    hs, gs, losses, weighted_losses = zip(*groups, strict=True)
    h = sum(hs) / sum(h.trace() for h in hs)
    tokens = sum(len(x) for x in x_parts)
    blocks = [g * (sum(losses) / sum(weighted_losses) / tokens) for g in gs]
    found_h, found_g = statistics.input_moment(name), statistics.output_fisher(name)
    assert found_h is not None and found_g is not None
    torch.testing.assert_close(found_h, h, rtol=1e-3, atol=1e-4 * float(h.abs().max()))
    expected = torch.block_diag(*blocks)
    torch.testing.assert_close(found_g, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def test_text_that_only_runs_forward_counts_in_h(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H is that of all sequences; G, and what is known of the head, that of every second one."""
    monkeypatch.setattr(moments, "noise_share", lambda total, parts: 0.0)  # there are two segments
    checkpoint, name = tiny_checkpoint("llama"), "model.layers.1.self_attn.k_proj.weight"
    found = _collect(checkpoint, tmp_path / "s", _batches(5), gradient_every=2, chunk=2)
    h, _ = _reference(checkpoint, _batches(5), name, roots=5 * [1.0])
    _, g = _reference(checkpoint, _batches(5)[::2], name, numbers=(0, 2, 4))
    found_h, found_g = found.input_moment(name), found.output_fisher(name)
    assert found_h is not None and found_g is not None
    torch.testing.assert_close(found_h, h, rtol=1e-3, atol=2e-5 * float(h.abs().max()))
    torch.testing.assert_close(found_g, g, rtol=1e-3, atol=1e-4 * float(g.abs().max()))
    head = _collect(checkpoint, tmp_path / "head", _batches(5)[::2]).output_fisher("lm_head.weight")
    torch.testing.assert_close(found.output_fisher("lm_head.weight"), head)


def test_only_matrices_without_gradients_are_not_covered(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint("deepseek_v32")
    statistics = _collect(checkpoint, tmp_path / "s", _batches())
    model_map = map_model(open_checkpoint(checkpoint))
    uncovered = {
        p.role for p in model_map.parameters.values() if p.compress and not statistics.covers(p.name)
    }
    assert uncovered == {"indexer"}


def test_the_size_of_chunks_does_not_matter(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("llama")
    one = _collect(checkpoint, tmp_path / "one", _batches(5), chunk=1)
    all_ = _collect(checkpoint, tmp_path / "all", _batches(5), chunk=5)
    name = "model.layers.1.mlp.gate_proj.weight"
    for part in ("input_moment", "output_fisher"):
        left, right = getattr(one, part)(name), getattr(all_, part)(name)
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-5 * float(left.abs().max()))


def test_a_router_with_a_table_of_tokens_gets_the_tokens_of_its_chunk(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """DeepSeek-V4's first layers choose experts by a table of tokens, so the tokens are arguments of the layer."""
    checkpoint = tiny_checkpoint("deepseek_v4")
    one = _collect(checkpoint, tmp_path / "one", _batches(6), chunk=2)
    all_ = _collect(checkpoint, tmp_path / "all", _batches(6), chunk=6)
    hashed = "model.layers.0.mlp.experts.down_proj"
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    table = model.get_submodule("model.layers.0.mlp.gate").tid2eid
    expected = torch.bincount(table[_batches(6).reshape(-1)].reshape(-1).long(), minlength=4).tolist()
    assert [one.tokens(hashed, expert) for expert in range(4)] == expected
    for name in ("model.layers.0.self_attn.q_a_proj.weight", "model.layers.3.self_attn.q_b_proj.weight"):
        for part in ("input_moment", "output_fisher"):
            left, right = getattr(one, part)(name), getattr(all_, part)(name)
            torch.testing.assert_close(left, right, rtol=1e-2, atol=1e-4 * float(left.abs().max()))


def test_every_expert_has_statistics(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("deepseek_v3")
    statistics = _collect(checkpoint, tmp_path / "s", _batches())
    model_map = map_model(open_checkpoint(checkpoint))
    stacks = [p for p in model_map.parameters.values() if len(p.shape) == 3]
    assert stacks
    for stack in stacks:
        routed = 0
        for expert in range(stack.shape[0]):
            h, g = statistics.input_moment(stack.name, expert), statistics.output_fisher(stack.name, expert)
            assert h is not None and h.shape == (stack.shape[2],) * 2
            assert g is not None and g.shape == (stack.shape[1],) * 2
            assert float(h.trace()) == pytest.approx(1.0, abs=1e-3)
            routed += statistics.tokens(stack.name, expert)
        assert routed == _batches().numel() * model_map.config.num_experts_per_tok


def _embedding_gradient(checkpoint: Path, number: int) -> torch.Tensor:
    """The embedding's gradient (vocabulary, n) for one sequence, from a backward pass through the whole model."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    generator = torch.Generator().manual_seed(sequence_seed(0, number))
    logits = model(input_ids=_batches()[number][None]).logits[0]
    logits.backward(sampled_gradient(logits.detach().softmax(-1), _draws(logits.shape[0], generator)))
    gradient = model.get_input_embeddings().weight.grad
    assert gradient is not None
    return gradient


def test_the_heads_diagonal_is_the_exact_expectation(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint("llama")
    statistics = _collect(checkpoint, tmp_path / "s", _batches())
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        hidden = model.model(input_ids=_batches()).last_hidden_state.reshape(-1, model.config.hidden_size)
        p = model.lm_head(hidden).softmax(-1)
    expected = (p * (1 - p) * hidden.square().sum(1, keepdim=True)).mean(0)
    found = statistics.output_fisher("lm_head.weight")
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
    use = statistics.embedding_use("model.embed_tokens.weight")
    assert use is not None
    torch.testing.assert_close(use.frequency, p.mean(0), rtol=1e-4, atol=1e-7)
    assert INDEX in {path.name for path in (tmp_path / "s").iterdir()}
    spread = (p * (1 - p)).double()
    seen = spread.sum(0).square() / spread.square().sum(0)
    mean = spread.T @ hidden.double() / spread.sum(0)[:, None]
    share = spread.sum(0) / (expected.double() * len(p)) * seen / (seen + 1)
    contexts = statistics.contexts("lm_head.weight")
    assert contexts is not None and statistics.contexts("model.embed_tokens.weight") is None
    torch.testing.assert_close(contexts.double(), mean * share.sqrt()[:, None], rtol=2**-8, atol=1e-6)


def test_the_sums_of_one_segment_of_the_vocabulary_are_in_memory(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are as large as the embedding. The totals are on the disk."""
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    zeros, vocabulary = torch.zeros, (VOCABULARY, 48)

    def counted(*shape: int, **options: Any) -> torch.Tensor:
        if shape == vocabulary:
            alive.append(sum(each() is not None for each in made))
        found = zeros(*shape, **options)
        if shape == vocabulary:
            made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(torch, "zeros", counted)
    monkeypatch.setattr(sums, "SEGMENTS", 3)
    _collect(tiny_checkpoint("llama"), tmp_path / "out", _batches(), chunk=1)
    assert alive == [0, 0, 0]


def test_the_heads_fisher_includes_a_soft_cap_of_the_logits(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """The soft cap l = c tanh(o / c) of the head's output o has the slope 1 - (l / c)²."""
    cap = 0.5
    checkpoint = tiny_checkpoint("gemma3", final_logit_softcapping=cap)
    statistics = _collect(checkpoint, tmp_path / "s", _batches())
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        hidden = model.model(input_ids=_batches()).last_hidden_state.reshape(-1, model.config.hidden_size)
        logits = cap * torch.tanh(model.lm_head(hidden) / cap)
    p = logits.softmax(-1)
    spread = p * (1 - p) * (1 - (logits / cap) ** 2) ** 2
    found = statistics.output_fisher("model.embed_tokens.weight")
    assert found is not None
    expected = (spread * hidden.square().sum(1, keepdim=True)).mean(0)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v4"])
def test_an_embedding_rows_gradients_add_up_over_its_occurrences(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    """Gemma multiplies the rows by a factor; DeepSeek-V4 copies them into several residual streams."""
    checkpoint = tiny_checkpoint(family, tie_word_embeddings=False)
    use = _collect(checkpoint, tmp_path / "s", _batches()).embedding_use("model.embed_tokens.weight")
    assert use is not None
    sequences = [_embedding_gradient(checkpoint, number) for number in range(len(_batches()))]
    token_sums = torch.stack(sequences)  # (sequences, vocabulary, n)
    root = token_sums.norm(dim=2, keepdim=True).clamp_min(1e-30).sqrt()
    moment = torch.einsum("svn,svm->nm", token_sums / root, token_sums / root)
    torch.testing.assert_close(use.moment, moment / moment.trace(), rtol=1e-3, atol=1e-5)
    occurrences = torch.bincount(_batches().flatten(), minlength=len(use.token_fisher))
    seen = occurrences > 0
    mean = use.token_fisher[~seen]
    assert torch.equal(mean, mean[:1].expand_as(mean))
    squares = use.token_fisher * (occurrences + PRIOR_OCCURRENCES) - PRIOR_OCCURRENCES * mean[0]
    by_token = token_sums.square().sum((0, 2))
    torch.testing.assert_close(squares[seen], by_token[seen], rtol=1e-2, atol=1e-3 * float(by_token.max()))


@pytest.mark.parametrize("family", ["llama", "llama_tied"])
def test_contexts_are_subtracted_from_the_common_moment(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    """The common residual and the rows' context parts add up to the moment of all rows together."""
    checkpoint = tiny_checkpoint(family)
    statistics = _collect(checkpoint, tmp_path / "s", _batches())
    matrices = weight_matrices(map_model(open_checkpoint(checkpoint)).parameters.values())
    matrix = next(
        matrix for matrix in matrices if matrix.role == ("head" if family == "llama" else "embedding")
    )
    with_contexts = fisher_of(matrix, statistics)
    contexts = with_contexts.contexts
    assert contexts is not None
    statistics._files[CONTEXTS].clear()
    without = fisher_of(matrix, statistics)
    assert without.contexts is None
    assert torch.equal(with_contexts.outputs, without.outputs)
    weight = without.outputs ** (1 / TOKEN_WEIGHT_EXPONENT)  # before it was tempered, up to a factor
    v = contexts.float32()
    context_part = (v * (weight / weight.sum())[:, None]).T @ v
    torch.testing.assert_close(with_contexts.inputs + context_part, without.inputs, rtol=1e-3, atol=1e-5)
    assert float(torch.linalg.eigvalsh(with_contexts.inputs).min()) > -1e-6
    assert 0.01 < float(context_part.trace() / without.inputs.trace()) < 1.0
