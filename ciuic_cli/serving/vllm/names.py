"""How vLLM's names of modules lead to an artifact's tensors. Needs no vLLM.

vLLM merges linears that share their input (q, k and v; gate and up; q_a and kv_a of MLA): one module, several tensors
of the files. A layer's routed experts are one module with two stacks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

MERGED: Mapping[str, Sequence[str]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Merged linears and their parts in the order of the rows. vLLM passes the same lists, but for some only after the
modules have been built."""

EXPERT_STACKS = {"gate_up_proj": "w13", "down_proj": "w2"}
"""Stacks in the files -> parameters of vLLM's module of routed experts; gate before up in both."""

RENAMED: Mapping[str, Mapping[str, str]] = {"mixtral": {".mlp.": ".block_sparse_moe."}}
"""By `model_type`: parts of transformers' names in memory, which artifacts have -> of the names that vLLM expects."""

_EMBEDDINGS = ("embed_tokens.weight", "word_embeddings.weight", "wte.weight")
"""Endings of the names of input embeddings."""
_LAYER = re.compile(r"^(?:.*\.)?layers\.\d+\.")


def linear_tensors(
    prefix: str, stored: Collection[str], merged: Mapping[str, Sequence[str]] = MERGED
) -> tuple[str, ...]:
    """The tensors of the linear `prefix` in the order of its rows; empty if none of them is in `stored`.

    Args:
        prefix: the module's name in vLLM, "model.layers.0.self_attn.qkv_proj".
        stored: names of compressed tensors.
        merged: as MERGED; entries that are missing are taken from there.
    """
    whole = f"{prefix}.weight"
    if whole in stored:
        return (whole,)
    parent, _, last = prefix.rpartition(".")
    parts = merged.get(last) or MERGED.get(last, ())
    names = tuple(f"{parent}.{part}.weight" if parent else f"{part}.weight" for part in parts)
    return names if any(name in stored for name in names) else ()


def embedding_tensor(prefix: str, stored: Collection[str]) -> str | None:
    """The table of the embedding `prefix`, or None if it is not in `stored`.

    vLLM's Llama models give their embedding no name (""). Then it is the only tensor with the name of an embedding.
    """
    if f"{prefix}.weight" in stored:
        return f"{prefix}.weight"
    if prefix:
        return None
    found = [name for name in stored if name.endswith(_EMBEDDINGS)]
    return found[0] if len(found) == 1 else None


def expands_latents(prefix: str) -> bool:
    """Whether the linear `prefix` computes keys and values from the cached latents of MLA."""
    return prefix.endswith(".kv_b_proj")


def expert_tensors(prefix: str, stored: Collection[str]) -> dict[str, str]:
    """Parameter -> stack, of the experts `prefix`; empty if they are not in `stored`."""
    parent = prefix.removesuffix(".routed_experts")
    found = {short: f"{parent}.{name}" for name, short in EXPERT_STACKS.items()}
    return found if all(name in stored for name in found.values()) else {}


def layer_of(name: str) -> str | None:
    """The prefix of the tensor's decoder layer, "model.layers.3."; None for a tensor outside the layers."""
    match = _LAYER.match(name)
    return match[0] if match else None


def renamed(name: str, model_type: str) -> str:
    """A tensor's name in an artifact, as vLLM's model of this type expects it."""
    for old, new in RENAMED.get(model_type, {}).items():
        name = name.replace(old, new, 1)
    return name
