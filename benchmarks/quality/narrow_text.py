"""Measures what a calibration text of one kind costs on other kinds, alone and blended with the package's mix.

    python benchmarks/quality/narrow_text.py MODEL --texts code.txt web.txt ... --narrow web.txt --out FOLDER

The first half of each narrow text is given to `ciuic compress` as `--calibration`; KL is measured on windows of the
second half of every text, at even distances, in float32. One artifact is made with the package's mix, and two per
narrow text: blended (the default) and with `--calibration-only`. Artifacts that are in FOLDER already are used again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean, stdev

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ciuic_cli  # noqa: F401  registers artifacts with transformers
from ciuic_cli.compression.pipeline import compress
from ciuic_cli.process.numeric_libraries import configure_numeric_libraries


def halves(file: Path, folder: Path) -> tuple[Path, Path]:
    """Write the first and the second half of the text's lines into `folder`."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    parts = folder / f"{file.stem}.first.txt", folder / f"{file.stem}.second.txt"
    for part, content in zip(parts, (lines[: len(lines) // 2], lines[len(lines) // 2 :]), strict=True):
        part.write_text("".join(content), encoding="utf-8")
    return parts


def spread_windows(file: Path, model: Path, seqlen: int, limit: int) -> torch.Tensor:
    """At most `limit` windows of the text, LongTensor (n, seqlen), at even distances."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = torch.tensor(tokenizer(file.read_text(encoding="utf-8"), verbose=False)["input_ids"])
    count = min(limit, len(ids) // seqlen)
    distance = len(ids) // max(count, 1)
    return torch.stack([ids[number * distance :][:seqlen] for number in range(count)])


@torch.inference_mode()
def measured(artifact: Path, texts: dict[str, torch.Tensor], model: Path) -> dict[str, list[float]]:
    """KL in nats per token of every window, by name of the text; kept in a file beside the artifact."""
    record = artifact.with_suffix(".json")
    known: dict[str, list[float]] = json.loads(record.read_text()) if record.exists() else {}
    if missing := [name for name in texts if name not in known]:
        original, compressed = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            for folder in (model, artifact)
        )
        for name in missing:
            known[name] = []
            for window in texts[name].split(1):
                p, q = (each(window).logits[0].log_softmax(-1) for each in (original, compressed))
                known[name].append(float((p.exp() * (p - q)).sum(-1).mean()))
        record.write_text(json.dumps(known))
    return known


def ratio(above: list[float], below: list[float]) -> str:
    """Ratio of the means of the same windows, with its standard error (delta method)."""
    found = fmean(above) / fmean(below)
    differences = [a - found * b for a, b in zip(above, below, strict=True)]
    error = stdev(differences) / len(above) ** 0.5 / fmean(below)
    return f"{found:.2f} ± {error:.2f}"


def made(name: str, options: argparse.Namespace, **calibration: object) -> Path:
    """The artifact of this name, compressed unless it exists."""
    out = options.out / name
    if not out.exists():
        report = compress(
            options.model,
            out,
            effort=options.effort,
            seqlen=options.seqlen,
            device="cpu",
            force=True,
            **calibration,
        )
        seen = report.statistics.vocabulary_seen or 0.0
        print(
            f"{name}: {report.statistics.tokens} tokens, {100 * seen:.1f} % of the vocabulary",
            file=sys.stderr,
        )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help="one file for each kind of text")
    parser.add_argument("--narrow", type=Path, nargs="+", required=True, help="those of them to calibrate on")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--effort", default="fast")
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--limit", type=int, default=8, help="windows per text")
    options = parser.parse_args()
    configure_numeric_libraries()
    options.out.mkdir(parents=True, exist_ok=True)
    parts = {text.stem: halves(text, options.out) for text in options.texts}
    texts = {
        name: spread_windows(second, options.model, options.seqlen, options.limit)
        for name, (_, second) in parts.items()
    }
    mix = measured(made("mix", options), texts, options.model)
    print(
        "| calibration | text | mix | blend | alone | blend / mix | blend / alone |\n|---|---|---|---|---|---|---|"
    )
    for name in (text.stem for text in options.narrow):
        own = {"calibration": parts[name][0]}
        blend = measured(made(f"{name}-blend", options, **own), texts, options.model)
        alone = measured(made(f"{name}-alone", options, **own, calibration_only=True), texts, options.model)
        for text in texts:
            kls = " | ".join(f"{fmean(each[text]):.4f}" for each in (mix, blend, alone))
            print(
                f"| {name} | {text} | {kls} | {ratio(blend[text], mix[text])} | "
                f"{ratio(blend[text], alone[text])} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
