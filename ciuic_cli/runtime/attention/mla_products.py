"""Attention over cached latents (MLA of DeepSeek V2, V3 and V3.2) with the compressed `kv_b_proj`.

The cache holds one latent c_t (kv_lora_rank numbers) and one rotary key k_t per token. Head h expands a latent to
its key W_UK,h c_t and its value W_UV,h c_t; these are the rows of `kv_b_proj`. There are two ways to attend:

- *Absorbed*: (W_UK,hᵀ q) · c_t is the same score as q · (W_UK,h c_t), and W_UV,h (Σ p_t c_t) the same output as
  Σ p_t (W_UV,h c_t). The context is never expanded: `kv_b_proj` meets one vector per query and head, however long the
  context is.
- *Expanded*: keys and values of all context tokens are computed, a few heads at a time so that memory is bounded.

Each multiplies less than the other in one regime; `absorbing_is_cheaper` compares the two counts. Decoding is
absorbed at any context, a prompt is expanded.
Source: DeepSeek-V2 (DeepSeek-AI 2024, arXiv 2405.04434), section 2.1.2 and appendix B.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from ciuic_cli.codecs.transform import inverse_transform, transform
from ciuic_cli.runtime.attention import latent_kernel, prompt_kernel
from ciuic_cli.runtime.attention.inputs import AttentionInputs
from ciuic_cli.runtime.matrices import Matrix

EXPANDED_BYTES = 64 << 20
"""Scratch for expanded keys and values: heads are expanded in groups that fit. Chosen, not tuned: several times the
last-level cache share of a core, and small beside a model's weights."""


@dataclass(frozen=True)
class HeadShape:
    """How the rows of `kv_b_proj` belong to heads.

    Attributes:
        heads: number of heads.
        nope: key rows per head (`qk_nope_head_dim`); the others are value rows.
        dtype: in which products with the decoded rows are computed.
    """

    heads: int
    nope: int
    dtype: torch.dtype


@dataclass(frozen=True)
class UpProjection:
    """The rows of `kv_b_proj` by head, ready for both ways to attend.

    Attributes:
        weight: [heads, nope + v, width] in the dtype of the products; a head's key rows come first. In the basis of
            `codecs.transform` (width is kv_lora_rank, padded to a multiple of 16) unless `seed` is None.
        rank: kv_lora_rank.
        nope: key rows per head (`qk_nope_head_dim`).
        seed: seed of the transform's signs; None where `weight` is in the original basis.
        input_factors: None, or float32 [rank]: each latent coordinate is multiplied by it first.
    """

    weight: torch.Tensor
    rank: int
    nope: int
    seed: int | None = None
    input_factors: torch.Tensor | None = None

    @classmethod
    def of(cls, matrix: Matrix, shape: HeadShape, decoded: torch.Tensor | None = None) -> UpProjection:
        """From a compressed matrix; decoded: the result of `decoded_rows` where it is known."""
        rows = decoded_rows(matrix, shape.dtype) if decoded is None else decoded
        by_head = rows.view(shape.heads, -1, rows.shape[-1])
        return cls(by_head, matrix.cols, shape.nope, matrix.seed, matrix.input_factors)

    @property
    def v(self) -> int:
        """Value rows per head."""
        return self.weight.shape[1] - self.nope

    def into_basis(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents [..., rank] to [..., width], such that `weight` times the result is `kv_b_proj` of the latents."""
        if self.input_factors is not None:
            latents = latents * self.input_factors
        if self.seed is None:
            return latents.to(self.weight.dtype)
        return transform(latents, self.seed).to(self.weight.dtype)

    def out_of_basis(self, x: torch.Tensor) -> torch.Tensor:
        """The transpose of `into_basis`: [..., width] to float32 [..., rank]."""
        x = x.to(torch.float32) if self.seed is None else inverse_transform(x, self.rank, self.seed)
        return x if self.input_factors is None else x * self.input_factors

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """W_UKᵀ q: query [b, heads, s, nope] to float32 [b, heads, s, rank]."""
        heads, back = _heads_first(query.to(self.weight.dtype))
        return self.out_of_basis(back(torch.bmm(heads, self.weight[:, : self.nope])))

    def values(self, latents: torch.Tensor) -> torch.Tensor:
        """W_UV c, each head with a latent of its own: [b, heads, s, rank] to [b, heads, s, v]."""
        heads, back = _heads_first(self.into_basis(latents))
        # Weight first: with the weight transposed, torch's CPU product takes seven times as long (it reorders it).
        return back(torch.bmm(self.weight[:, self.nope :], heads.mT).mT)

    def expand(self, latents: torch.Tensor, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of heads begin to end - 1 from latents in the basis, [b, 1, context, width]:
        [b, heads, context, nope] and [b, heads, context, v]."""
        rows = self.weight[begin:end].reshape(-1, self.weight.shape[-1])
        both = F.linear(latents[:, 0], rows).unflatten(-1, (end - begin, -1)).transpose(1, 2)
        return both[..., : self.nope], both[..., self.nope :]


def decoded_rows(matrix: Matrix, dtype: torch.dtype) -> torch.Tensor:
    """All rows of W in their own order, low-rank part included, in the transformed basis: [rows, cols_padded].

    Input scales are left out: they belong to x (`Matrix.input_factors`).
    """
    rows = matrix.decode(0, matrix.rows, dtype)
    if matrix.lowrank is not None:
        right, left = matrix.lowrank
        inner = inverse_transform(right.decode(0, right.rows), right.cols, right.seed)
        columns = inverse_transform(left.decode(0, left.rows), left.cols, left.seed)  # [rank, stored rows]
        rows = (rows + columns.T @ transform(inner, matrix.seed)).to(dtype)
    return rows if matrix.position is None else rows.index_select(0, matrix.position)


def absorbing_is_cheaper(queries: int, context: int, *, rank: int, nope: int, rope: int, v: int) -> bool:
    """Whether absorbed attention takes fewer multiplications than expanded, per head and sequence.

    Args:
        queries: query tokens of this call.
        context: tokens in the cache, these included.
        rank, nope, rope, v: `kv_lora_rank`, `qk_nope_head_dim`, `qk_rope_head_dim`, `v_head_dim`.
    """
    absorbed = queries * (rank * (nope + v) + context * (2 * rank + rope))
    expanded = context * (rank * (nope + v) + queries * (nope + rope + v))
    return absorbed < expanded


def attention(up: UpProjection, inputs: AttentionInputs, *, is_causal: bool) -> torch.Tensor:
    """Absorbed or expanded attention, whichever multiplies less; result as `absorbed_attention`.

    is_causal: query i sees the first i + 1 tokens; the mask is None then.
    """
    queries, context = inputs.query.shape[2], inputs.latents.shape[2]
    rope = inputs.rotary_keys.shape[-1]
    if not absorbing_is_cheaper(queries, context, rank=up.rank, nope=up.nope, rope=rope, v=up.v):
        return expanded_attention(up, inputs, is_causal=is_causal)
    if is_causal:
        seen = torch.ones(queries, context, dtype=torch.bool, device=inputs.query.device).tril()
        inputs = replace(inputs, mask=seen[None, None])
    return absorbed_attention(up, inputs)


def absorbed_attention(up: UpProjection, inputs: AttentionInputs) -> torch.Tensor:
    """Attention of every head over the latents themselves.

    Returns:
        [b, heads, s, v] in the dtype of the query. Scores and sums are float32.
    """
    query, latents, scaling = inputs.query, inputs.latents, inputs.scaling
    b, heads, s, _ = query.shape
    q_nope, q_rot = query.split([up.nope, query.shape[-1] - up.nope], dim=-1)
    if latent_kernel.fits(inputs):
        return up.values(latent_kernel.attention(up.absorb(q_nope), q_rot, inputs)).to(query.dtype)
    # The rotary half of the scores enters as a bias, so that queries, keys and values all have `rank` numbers, which
    # is what torch's flash kernel for CPUs asks for. All heads share the keys: they are the rows of one long query.
    bias = _masked(_rotary_scores(q_rot, inputs.rotary_keys) * scaling, inputs.mask)
    out = F.scaled_dot_product_attention(
        up.absorb(q_nope).to(query.dtype).reshape(b, 1, heads * s, -1),
        latents,
        latents,
        attn_mask=bias.reshape(b, 1, heads * s, -1),
        scale=scaling,
    )
    return up.values(out.view(b, heads, s, -1)).to(query.dtype)


def absorbed_attention_weights(
    up: UpProjection, inputs: AttentionInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `absorbed_attention`, for callers that want the attention weights too: (result, [b, heads, s, context])."""
    query, latents = inputs.query, inputs.latents
    q_nope, q_rot = query.split([up.nope, query.shape[-1] - up.nope], dim=-1)
    scores = torch.matmul(up.absorb(q_nope), latents.float().mT)
    scores += _rotary_scores(q_rot, inputs.rotary_keys)
    weights = _masked(scores * inputs.scaling, inputs.mask).softmax(-1).to(query.dtype)
    return up.values(torch.matmul(weights, latents)).to(query.dtype), weights


def expanded_attention(up: UpProjection, inputs: AttentionInputs, *, is_causal: bool) -> torch.Tensor:
    """Attention over keys and values that are expanded from the latents a few heads at a time.

    is_causal: as in `attention`. Result as `absorbed_attention`.
    """
    query, mask = inputs.query, inputs.mask
    b, heads, _, dim = query.shape
    out = query.new_empty((*query.shape[:-1], up.v))
    in_basis = up.into_basis(inputs.latents)
    width = max(dim, up.v)
    per_head = b * inputs.latents.shape[2] * (up.nope + up.v + 2 * width) * query.element_size()
    step = max(1, EXPANDED_BYTES // per_head)
    for begin in range(0, heads, step):
        end = min(heads, begin + step)
        k_nope, v = up.expand(in_basis, begin, end)
        key = torch.cat([k_nope, inputs.rotary_keys.expand(-1, end - begin, -1, -1)], dim=-1).to(query.dtype)
        of_heads, v = query[:, begin:end], v.to(query.dtype)
        if prompt_kernel.fits(of_heads, key, v, mask):
            found = prompt_kernel.attention(
                of_heads, key, v, mask, scaling=inputs.scaling, is_causal=is_causal
            )
            out[:, begin:end] = found.transpose(1, 2)
            continue
        # torch's flash kernel for CPUs wants one width for keys and values; without it all scores are in memory.
        found = F.scaled_dot_product_attention(
            _widened(of_heads, width),
            _widened(key, width),
            _widened(v, width),
            attn_mask=mask if mask is None or mask.shape[1] == 1 else mask[:, begin:end],
            is_causal=is_causal,
            scale=inputs.scaling,
        )
        out[:, begin:end] = found[..., : up.v]
    return out


def _widened(x: torch.Tensor, width: int) -> torch.Tensor:
    """x [..., n] with zeros behind it: [..., width]."""
    return F.pad(x, (0, width - x.shape[-1]))


def _rotary_scores(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[b, heads, s, rope] and [b, 1, context, rope] to float32 [b, heads, s, context], one product per sequence."""
    scores = torch.bmm(query.float().flatten(1, 2), keys[:, 0].float().mT)
    return scores.unflatten(1, (query.shape[1], query.shape[2]))


def _masked(scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Scores (float32) with hidden tokens far below all others; the lowest number, not -inf: rows may be all hidden."""
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, torch.finfo(torch.float32).min)
    return scores + mask


def _heads_first(x: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """x [b, heads, s, n] as [heads, b * s, n], and the way back: no weight is copied once per sequence."""
    b, heads, s, _ = x.shape

    def back(y: torch.Tensor) -> torch.Tensor:
        return y.reshape(heads, b, s, -1).transpose(0, 1)

    return x.transpose(0, 1).reshape(heads, b * s, -1), back
