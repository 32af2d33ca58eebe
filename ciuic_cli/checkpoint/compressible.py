"""Whether a module can hold a compressed weight: a linear, rows of a table, experts as transformers lays them out.

What is compressed (`roles`) and what loading puts in a module's place (`runtime.swap`) have to agree.
"""

from __future__ import annotations

from torch import nn

STACKS = ("gate_up_proj", "down_proj")
"""The parameters of an experts module that are stored as stacks of blobs."""

_LAYOUT_FLAGS = {"has_gate": True, "has_bias": False, "is_concatenated": True}


def experts_fault(dense: nn.Module) -> str | None:
    """Why this experts module cannot hold packed stacks, or None if it can."""
    if not all(name in dense._parameters for name in STACKS):
        return f"it has no parameters {' and '.join(STACKS)}"
    up, down = (dense.get_parameter(name).shape for name in STACKS)
    as_outputs = up[2] == down[1] and up[1] in (down[2], 2 * down[2])
    if getattr(dense, "is_transposed", False) or not as_outputs:
        return "its experts are stored as (inputs, outputs)"
    if not hasattr(dense, "_apply_gate"):
        return "it does not follow transformers' experts interface"
    for flag, expected in _LAYOUT_FLAGS.items():
        if getattr(dense, flag, expected) != expected:
            return f"its weights are laid out differently ({flag}={not expected})"
    if getattr(dense, "has_post_expert_norm", False):
        return "it normalises each expert's output"
    return None


def matrix_fault(dense: nn.Module) -> str | None:
    """Why this module cannot hold a packed matrix as its weight, or None if it can."""
    if isinstance(dense, nn.Embedding):
        plain = type(dense).forward is nn.Embedding.forward or factor_of(dense) is not None
        return None if plain else "its class computes something else from the table"
    if isinstance(dense, nn.Linear):
        plain = type(dense).forward is nn.Linear.forward or is_grouped(dense)
        return None if plain else "its class computes something else than x W^T"
    return "it is neither a linear nor an embedding"


def factor_of(embedding: nn.Embedding) -> float | None:
    """The factor of a scaled embedding (Gemma keeps it as a number beside a buffer that may be on meta)."""
    value = getattr(embedding, "scalar_embed_scale", None)
    return float(value) if isinstance(value, (int, float)) else None


def is_grouped(linear: nn.Linear) -> bool:
    """Whether it is block diagonal (DeepSeek-V4's `o_a_proj`)."""
    return type(linear).__name__.endswith("GroupedLinear") and linear.bias is None
