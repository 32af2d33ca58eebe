"""What the memory report says in words, on the terminal and on its page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ciuic_cli.report.readable import readable_bytes

MUCH = 0.3
"""Nats per token from which a loss is warned of."""


def pass_sentence(step: Mapping[str, Any]) -> str:
    """What one row of the report's `passes` did, in words."""
    if step["name"] == "prune":
        return f"{step['weights']:,} weights left out, {step['structures']:,} whole structures among them"
    if step["name"] == "lowrank":
        return f"{step['matrices']:,} matrices have a low-rank part, {readable_bytes(step['bytes'])} in all"
    if step["name"] == "recovery":
        if step["kl_after"] >= step["kl_before"]:
            return f"{step['steps']} steps lowered no KL on held-out text; nothing of them was kept"
        return (
            f"{step['steps']} steps tuned the row scales of {step['matrices']:,} matrices and {step['norms']:,} norms: "
            f"KL on held-out text {step['kl_after']:.3g} instead of {step['kl_before']:.3g}"
        )
    return (
        f"{readable_bytes(step['bytes'])} of codes; {step['sorted_matrices']:,} matrices are stored with rows that "
        f"matter alike side by side, {step['scaled_matrices']:,} with scales of their inputs"
    )


def much_is_lost(report: Mapping[str, Any]) -> str | None:
    """A warning where the loss, measured or else predicted, is more than anyone is likely to want."""
    loss = report["predicted_kl"] if report["measured_kl"] is None else report["measured_kl"]
    if loss < MUCH:
        return None
    return (
        f"much is lost: a KL divergence of {loss:.2g} nats per token is a perplexity of about "
        f"{math.exp(min(loss, 20.0)):.2g} times the original's; ask for a smaller --ratio"
    )


def padding_sentence(padding: Mapping[str, int]) -> str:
    """The report's `padding` in words."""
    if not padding["matrices"]:
        return "none is needed"
    return (
        f"{padding['matrices']:,} matrices end inside a 16 x 16 tile; the rest of these tiles is "
        f"{readable_bytes(padding['bytes'])} of the codes"
    )
