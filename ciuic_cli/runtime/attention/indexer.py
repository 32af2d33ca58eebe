"""The indexers of DeepSeek V3.2 and V4, which choose the tokens that attention sees, with native scores.

A token's score is the weighted sum over index heads of relu(query . key). transformers computes the products of all
heads in float32 and keeps them: 4 GB for a prompt of 4,096 tokens and 64 heads. The native kernel keeps the sums only,
and reads the cached keys where they are.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch
from torch import nn

from ciuic_cli.codecs import native
from ciuic_cli.runtime.attention import growing_cache
from ciuic_cli.runtime.mixed_classes import Mixin, mixed_class, original_class

MAX_COLUMNS = 512
"""Most columns of an index key: `kMaxIndexColumns` in native/attention/index_scores.h."""


def fits(queries: torch.Tensor, keys: torch.Tensor) -> bool:
    """Whether the kernel computes these scores: bfloat16 on a CPU, outside graphs.

    Args:
        queries: [b, s, heads, columns].
        keys: [b, tokens, columns].
    """
    return (
        all(t.device.type == "cpu" and t.dtype == torch.bfloat16 for t in (queries, keys))
        and not torch.compiler.is_compiling()
        and not (torch.is_grad_enabled() and (queries.requires_grad or keys.requires_grad))
        and queries.shape[-1] % 2 == 0
        and queries.shape[-1] <= MAX_COLUMNS
        and min(queries.numel(), keys.numel()) > 0
    )


def scores(queries: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Scores of a call that `fits`.

    Args:
        queries: bfloat16 [b, s, heads, columns].
        keys: bfloat16 [b, tokens, columns].
        weights: floating [b, s, heads]; a positive factor of all scores may be part of them.

    Returns:
        float32 [b, s, tokens].
    """
    b, s, heads, columns = queries.shape
    factors = queries.to(torch.float32).contiguous()
    by_head = weights.to(torch.float32).contiguous()
    keys = keys if keys.stride(-1) == 1 else keys.contiguous()
    out = torch.empty((b, s, keys.shape[1]), dtype=torch.float32)
    call = native.CiuicIndexScores(
        factors.data_ptr(), by_head.data_ptr(), keys.data_ptr(), keys.stride(0), keys.stride(1),
        b, s, heads, columns, keys.shape[1],
    )  # fmt: skip
    status = native.interface().ciuic_index_scores(
        ctypes.addressof(call), out.data_ptr(), torch.get_num_threads()
    )
    native.check(status, "scores of an indexer")
    return out


def largest(numbers: torch.Tensor, k: int) -> torch.Tensor:
    """Where the k largest numbers of each row are.

    Args:
        numbers: float32 [..., count] on the CPU.

    Returns:
        int32 [..., k], in ascending order; of equal numbers the first are taken.
    """
    numbers = numbers.contiguous()
    out = torch.empty((*numbers.shape[:-1], k), dtype=torch.int32)
    count = numbers.shape[-1]
    status = native.interface().ciuic_largest(
        numbers.data_ptr(), numbers.numel() // count, count, k, out.data_ptr(), torch.get_num_threads()
    )
    native.check(status, "choice of an indexer's tokens")
    return out


class NativeIndexer(Mixin):
    """Mixin for the indexer of DeepSeek V3.2."""

    @torch.no_grad()
    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        q_resid: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As the original class; the order of the chosen tokens is ascending.

        Args:
            hidden_states: [b, s, hidden].
            q_resid: [b, s, q_lora_rank].
            position_embeddings: cosines and sines, [b, s, rope] each.
            attention_mask: [b, s, tokens], bool (True: seen) or floating (added).
            args, kwargs: the cache, by the name that this version of transformers uses.

        Returns:
            int32 [b, s, k].
        """
        if (
            hidden_states.dtype != torch.bfloat16
            or hidden_states.device.type != "cpu"
            or torch.compiler.is_compiling()
        ):
            found: torch.Tensor = super().forward(  # type: ignore[misc]
                hidden_states, q_resid, position_embeddings, attention_mask, *args, **kwargs
            )
            return found
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        queries = self.wq_b(q_resid).unflatten(-1, (self.n_heads, self.head_dim))
        keys = self.k_norm(self.wk(hidden_states)).unsqueeze(2)
        rope = self.qk_rope_head_dim
        rotate = sys.modules[original_class(self).__module__].apply_rotary_pos_emb
        turned = rotate(queries[..., :rope], keys[..., :rope], *position_embeddings, unsqueeze_dim=2)
        queries, keys = (
            torch.cat([first, whole[..., rope:]], dim=-1)
            for first, whole in zip(turned, (queries, keys), strict=True)
        )
        keys = keys.squeeze(2)
        if cache is not None:
            growing_cache.let_grow(cache, self.layer_idx)
            keys = cache.update_indexer(keys, self.layer_idx).to(torch.bfloat16)
        weights = self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype)).float()
        found = scores(queries, keys, weights * (self.softmax_scale * self.n_heads**-0.5))
        if attention_mask.dtype == torch.bool:
            found = found.masked_fill(~attention_mask, float("-inf"))
        else:
            found = found + attention_mask
        return largest(found, min(self.index_topk, found.shape[-1]))


class NativeScorer(Mixin):
    """Mixin for the part of DeepSeek V4's indexer that computes the scores."""

    def forward(
        self: Any, q: torch.Tensor, compressed_kv: torch.Tensor, hidden_states: torch.Tensor
    ) -> torch.Tensor:
        """As the original class.

        Args:
            q: [b, s, heads, columns].
            compressed_kv: keys [b, tokens, columns].
            hidden_states: [b, s, hidden].

        Returns:
            float32 [b, s, tokens].
        """
        if not fits(q, compressed_kv):
            found: torch.Tensor = super().forward(q, compressed_kv, hidden_states)  # type: ignore[misc]
            return found
        weights = self.weights_proj(hidden_states).float() * (self.weights_scaling * self.softmax_scale)
        return scores(q, compressed_kv, weights)


_MIXINS = {"DeepseekV32Indexer": NativeIndexer, "DeepseekV4IndexerScorer": NativeScorer}
"""By the name of transformers' class, whose attributes the mixin uses."""


def adapt_indexers(model: nn.Module) -> None:
    """Let every indexer of a loaded model score natively, in place; twice changes nothing more."""
    for module in model.modules():
        mixin = _MIXINS.get(type(module).__name__)
        if mixin is not None and not isinstance(module, mixin):
            kind: Any = type(module)
            module.__class__ = mixed_class(mixin, kind)
