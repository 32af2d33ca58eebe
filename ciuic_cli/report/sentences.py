"""Sentences about the memory report, for the terminal and the report page."""

from __future__ import annotations

import math

from ciuic_cli.report.readable import readable_bytes
from ciuic_cli.report.schema import (
    BitsPass,
    LowRankPass,
    MemoryReport,
    PaddingReport,
    Pass,
    PrunePass,
)

LARGE_LOSS = 0.3
"""KL divergence (nats per token) above which the user is warned (chosen): perplexity grows by a third."""


def pass_sentence(step: Pass) -> str:
    """What one pass did."""
    if isinstance(step, PrunePass):
        return f"{step.weights:,} weights left out, {step.structures:,} whole structures among them"
    if isinstance(step, LowRankPass):
        return f"{step.matrices:,} matrices have a low-rank part, {readable_bytes(step.bytes)} in all"
    if isinstance(step, BitsPass):
        return (
            f"{readable_bytes(step.bytes)} of codes; {step.sorted_matrices:,} matrices are stored with rows that "
            f"matter alike side by side, {step.scaled_matrices:,} with scales of their inputs"
        )
    if step.kl_after >= step.kl_before:
        return f"{step.steps} steps lowered no KL on held-out text; nothing of them was kept"
    return (
        f"{step.steps} steps tuned the row scales of {step.matrices:,} matrices and {step.norms:,} norms: "
        f"KL on held-out text {step.kl_after:.3g} instead of {step.kl_before:.3g}"
    )


def large_loss_warning(report: MemoryReport) -> str | None:
    """A warning if the measured loss, or the predicted one where none was measured, is at least LARGE_LOSS."""
    loss = report.predicted_kl if report.measured_kl is None else report.measured_kl
    if loss < LARGE_LOSS:
        return None
    return (
        f"much is lost: a KL divergence of {loss:.2g} nats per token is a perplexity of about "
        f"{math.exp(min(loss, 20.0)):.2g} times the original's; ask for a smaller --ratio"
    )


def unrouted_experts_warning(report: MemoryReport) -> str | None:
    """A warning if calibration tokens did not reach every expert."""
    count = report.statistics.experts_without_tokens
    if not count:
        return None
    return f"{count} expert matrices saw no calibration token; they count as their layer's average"


def padding_sentence(padding: PaddingReport) -> str:
    """What padding to whole tiles costs."""
    if not padding.matrices:
        return "none is needed"
    return (
        f"{padding.matrices:,} matrices end inside a 16 x 16 tile; the rest of these tiles is "
        f"{readable_bytes(padding.bytes)} of the codes"
    )
