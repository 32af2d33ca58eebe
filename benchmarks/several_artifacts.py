"""Prints the KL of several artifacts of one model, whose original runs only once.

    python benchmarks/several_artifacts.py ORIGINAL ARTIFACT... --text FILE... [--limit 12] [--seqlen 512]

As `ciuic eval` for each artifact and text. With several texts the last line has the geometric mean of their KLs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

from ciuic_cli.evaluation.estimates import mean_of
from ciuic_cli.evaluation.opening import open_model
from ciuic_cli.evaluation.perplexity import token_metrics, windows_of


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("original", type=Path)
    parser.add_argument("artifacts", type=Path, nargs="+")
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--seqlen", type=int, default=512)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.original)
    original, *models = (
        open_model(path, "cpu", torch.float32) for path in (options.original, *options.artifacts)
    )
    means = []
    for text in options.text:
        windows = windows_of(text.read_text(encoding="utf-8"), tokenizer, options.seqlen, options.limit)
        found: list[list[np.ndarray]] = [[] for _ in models]
        for window in windows:
            with torch.no_grad():
                expected = original(window[None], use_cache=False).logits[0, :-1]
                for model, kls in zip(models, found, strict=True):
                    logits = model(window[None], use_cache=False).logits[0, :-1]
                    kls.append(token_metrics(logits, expected, window[1:])["kl"])
        estimates = [mean_of(kls) for kls in found]
        means.append([estimate.value for estimate in estimates])
        print(
            text.name, *(f"{each.value:.4f} ± {each.stderr:.4f}" for each in estimates), sep="\t", flush=True
        )
    print("geometric mean", *(f"{each:.4f}" for each in np.exp(np.log(means).mean(0))), sep="\t")


if __name__ == "__main__":
    main()
