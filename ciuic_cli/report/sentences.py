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
"""KL divergence in nats per token from which on the user is warned (chosen): perplexity grows by about a third."""


def pass_sentence(result: Pass) -> str:
    """A sentence that describes the result of one pass."""
    if isinstance(result, PrunePass):
        return f"{result.weights:,} weights pruned, among them {result.structures:,} whole structures"
    if isinstance(result, LowRankPass):
        return f"{result.matrices:,} matrices have a low-rank part; {readable_bytes(result.bytes)} in total"
    if isinstance(result, BitsPass):
        return (
            f"{readable_bytes(result.bytes)} of codes; the rows of {result.sorted_matrices:,} matrices are sorted by "
            f"sensitivity, {result.scaled_matrices:,} matrices have input scales"
        )
    if result.kl_after >= result.kl_before:
        return f"{result.steps} steps did not lower the KL on held-out text; their changes were discarded"
    return (
        f"{result.steps} steps tuned the row scales of {result.matrices:,} matrices and {result.norms:,} norms: "
        f"KL on held-out text {result.kl_before:.3g} before, {result.kl_after:.3g} after"
    )


def large_loss_warning(report: MemoryReport) -> str | None:
    """A warning if the measured loss, or the predicted one where none was measured, is at least LARGE_LOSS."""
    loss = report.predicted_kl if report.measured_kl is None else report.measured_kl
    if loss < LARGE_LOSS:
        return None
    return (
        f"large loss: a KL divergence of {loss:.2g} nats per token means a perplexity of about "
        f"{math.exp(min(loss, 20.0)):.2g} times the original's; use a smaller --ratio"
    )


def unrouted_experts_warning(report: MemoryReport) -> str | None:
    """A warning if calibration tokens did not reach every expert."""
    count = report.statistics.experts_without_tokens
    if not count:
        return None
    return f"{count} expert matrices saw no calibration token; their layer's average statistics are used"


def vocabulary_sentence(share: float) -> str:
    """A sentence on the tokens that the calibration text showed. share: of the vocabulary."""
    return (
        f"the calibration text has {100 * share:.3g} % of the vocabulary; "
        "the rows of all other tokens count as those of rare tokens"
    )


def padding_sentence(padding: PaddingReport) -> str:
    """A sentence on the cost of padding to whole tiles."""
    if not padding.matrices:
        return "none"
    return (
        f"{padding.matrices:,} matrices do not end at a 16 x 16 tile; padding takes "
        f"{readable_bytes(padding.bytes)} of the codes"
    )
