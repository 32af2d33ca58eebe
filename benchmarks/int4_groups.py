"""KL of linears in integers of 4 bits with a scale per group, the form that vLLM reads as compressed-tensors.

    ciuic export ARTIFACT DECODED --to bf16
    python benchmarks/int4_groups.py MODEL DECODED WORK --text samples/text/heldout.txt [--nsamples 8] [--sequences 4]

MODEL is the original, DECODED the artifact's weights in bfloat16. The linears of both are rounded to nearest and with
error feedback by ciuic's statistics; embeddings and heads keep 16 bits, as in vLLM. KL to MODEL on the text.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch

from ciuic_cli.allocation.matrices import EMBEDDING_ROLES, WeightMatrix, fisher_of, weight_matrices
from ciuic_cli.allocation.row_chunks import read_matrix
from ciuic_cli.checkpoint.model_map import ModelMap, map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.evaluation.estimates import mean_of
from ciuic_cli.evaluation.kl_meter import KLMeter
from ciuic_cli.export.gguf.feedback import Feedback, feedback_of, rounded
from ciuic_cli.export.gguf.writing import GgufOptions, calibration_text
from ciuic_cli.passes.fisher import KroneckerFisher
from ciuic_cli.process.progress import no_progress
from ciuic_cli.statistics.collect import collect_statistics
from ciuic_cli.statistics.files import Statistics
from ciuic_cli.text.calibration import calibration_batch
from ciuic_cli.text.tokenizer import open_tokenizer

LEVELS = torch.arange(-8.0, 8.0)
SHARES = torch.linspace(0.7, 1.0, 7)
"""Tried largest values of a group, as shares of its largest weight (chosen)."""


def in_groups(weight: torch.Tensor, fisher: KroneckerFisher, group: int, feedback: bool) -> torch.Tensor:
    """The rounded matrix (m, n) float32; scales in float16 with the least squared error weighted by H's diagonal."""
    blocks = weight.reshape(len(weight), -1, group)
    importance = fisher.inputs.diagonal().reshape(-1, group)
    best = torch.full(blocks.shape[:2], torch.inf)
    scale = torch.zeros_like(best)
    for share in SHARES.tolist():
        tried = (blocks.abs().amax(2) * share / 7).half().float()
        step = tried[..., None].clamp_min(torch.finfo(torch.float16).tiny)
        loss = ((blocks - (blocks / step).round().clamp(-8, 7) * step).square() * importance).sum(2)
        scale, best = torch.where(loss < best, tried, scale), torch.minimum(loss, best)
    step = scale.repeat_interleave(group, 1)
    order = torch.arange(weight.shape[1])
    how = feedback_of(fisher) if feedback else Feedback(order, None)
    return step * LEVELS[rounded(weight, step, torch.zeros_like(step), LEVELS, how).long()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("decoded", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--nsamples", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--group", type=int, default=64)
    options = parser.parse_args()
    original, artifact = (map_model(open_checkpoint(path)) for path in (options.model, options.decoded))
    cpu = torch.device("cpu")
    kept, meter_folder = options.work / "statistics", options.work / "meter"
    if kept.exists():
        statistics = Statistics(kept)
    else:
        kept.mkdir(parents=True)
        calibration = calibration_text(original, GgufOptions(nsamples=options.nsamples))
        statistics = collect_statistics(
            original,
            calibration.tokens,
            kept,
            device=cpu,
            seed=0,
            weights=calibration.weights,
            progress=no_progress,
        )
    text = calibration_batch(
        open_tokenizer(options.model), [options.text], nsamples=options.sequences, seqlen=512,
        vocab_size=original.config.get_text_config().vocab_size,
    )  # fmt: skip
    meter = KLMeter(original, text, meter_folder, device=cpu, progress=no_progress)
    matrices = {
        (matrix.name, matrix.expert): matrix
        for matrix in weight_matrices(original.parameters.values())
        if matrix.role not in EMBEDDING_ROLES
    }
    weights = sum(matrix.rows * matrix.cols for matrix in matrices.values())
    print(f"{weights:,} weights in linears of {original.stored_numel:,}; {text.numel():,} tokens")

    def override(
        source: ModelMap, feedback: bool, whole: dict[object, WeightMatrix], name: str, expert: int | None
    ) -> torch.Tensor | None:
        matrix = whole.get((name, expert))
        if matrix is None:
            return None
        weight = read_matrix(source, matrix)
        if matrix.cols % options.group:
            sys.exit(f"{name}: rows of {matrix.cols} weights are no multiple of {options.group}")
        return in_groups(weight, fisher_of(matrix, statistics), options.group, feedback)

    for title, source in (("original", original), ("artifact's weights", artifact)):
        for feedback in (False, True):
            kl = mean_of(meter.token_kls(partial(override, source, feedback, matrices)))
            how = "with error feedback" if feedback else "to nearest"
            print(f"{title}, {how}: KL {kl.value:.4f} ± {kl.stderr:.4f}", flush=True)

    def linears(name: str, expert: int | None) -> torch.Tensor | None:
        matrix = matrices.get((name, expert))
        return None if matrix is None else read_matrix(artifact, matrix)

    kl = mean_of(meter.token_kls(linears))
    print(f"artifact's linears as they are: KL {kl.value:.4f} ± {kl.stderr:.4f}")


if __name__ == "__main__":
    main()
