"""Which transformers modules can hold a compressed weight: linears, embeddings, and experts in the usual layout.

`roles` (what to compress) and `runtime.swap` (what replaces a module on loading) both ask here, so that they agree.
`matrix_fault` and `experts_fault` take a module and return the reason why not, or None.
"""

from __future__ import annotations

from torch import nn

EXPERT_STACKS = ("gate_up_proj", "down_proj")
"""The parameters of an experts module that are stored as stacks of blobs."""

_LAYOUT_FLAGS = {"has_gate": True, "has_bias": False, "is_concatenated": True}
"""Attributes of transformers' experts modules that describe the weight layout, with the supported values."""


def experts_fault(module: nn.Module) -> str | None:
    """Why this experts module cannot hold packed stacks, or None if it can."""
    if not all(name in module._parameters for name in EXPERT_STACKS):
        return f"it has no parameters {' and '.join(EXPERT_STACKS)}"
    up, down = (module.get_parameter(name).shape for name in EXPERT_STACKS)
    rows_are_outputs = up[2] == down[1] and up[1] in (down[2], 2 * down[2])
    if getattr(module, "is_transposed", False) or not rows_are_outputs:
        return "its experts are stored as (inputs, outputs)"
    if not hasattr(module, "_apply_gate"):
        return "it does not follow transformers' experts interface"
    for flag, expected in _LAYOUT_FLAGS.items():
        if getattr(module, flag, expected) != expected:
            return f"its weights are laid out differently ({flag}={not expected})"
    if getattr(module, "has_post_expert_norm", False):
        return "it normalises each expert's output"
    return None


def matrix_fault(module: nn.Module) -> str | None:
    """Why this module cannot hold a packed matrix as its weight, or None if it can."""
    if isinstance(module, nn.Embedding):
        is_plain = type(module).forward is nn.Embedding.forward or embedding_scale_of(module) is not None
        return None if is_plain else "its class computes something else from the table"
    if isinstance(module, nn.Linear):
        is_plain = type(module).forward is nn.Linear.forward or is_grouped_linear(module)
        return None if is_plain else "its class computes something else than x W^T"
    return "it is neither a linear nor an embedding"


def embedding_scale_of(embedding: nn.Embedding) -> float | None:
    """The factor by which the module multiplies its rows, or None. Gemma keeps it as a Python number."""
    value = getattr(embedding, "scalar_embed_scale", None)
    return float(value) if isinstance(value, (int, float)) else None


def is_grouped_linear(linear: nn.Linear) -> bool:
    """Whether the linear is block diagonal, as DeepSeek-V4's `o_a_proj` is."""
    return type(linear).__name__.endswith("GroupedLinear") and linear.bias is None
