"""Measures what a calibration text of one kind costs on other kinds, alone and blended with the package's mix.

    python benchmarks/quality/narrow_text.py MODEL --texts code.txt web.txt ... --narrow web.txt --out FOLDER

The first half of each narrow text is given to `ciuic compress` as `--calibration`; KL is measured on the second half of
every text. One artifact is made with the package's mix, and two per narrow text: blended (the default) and with
`--calibration-only`. Artifacts that are in FOLDER already are used again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ciuic_cli.compression.pipeline import compress
from ciuic_cli.evaluation.perplexity import evaluate
from ciuic_cli.process.numeric_libraries import configure_numeric_libraries


def halves(file: Path, folder: Path) -> tuple[Path, Path]:
    """Write the first and the second half of the text's lines into `folder`."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    parts = folder / f"{file.stem}.first.txt", folder / f"{file.stem}.second.txt"
    for part, content in zip(parts, (lines[: len(lines) // 2], lines[len(lines) // 2 :]), strict=True):
        part.write_text("".join(content), encoding="utf-8")
    return parts


def kls(artifact: Path, texts: dict[str, Path], options: argparse.Namespace) -> dict[str, float]:
    """Mean KL in nats per token by name of the text; measured once, then read from the artifact's side file."""
    record = artifact.with_suffix(".json")
    known: dict[str, float] = json.loads(record.read_text()) if record.exists() else {}
    for name, text in texts.items():
        if name not in known:
            found = evaluate(
                artifact,
                base=options.model,
                text=text,
                seqlen=options.seqlen,
                limit=options.limit,
                device="cpu",
            )
            known[name] = found["kl_mean"]
            record.write_text(json.dumps(known))
    return known


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
    measured = {name: second for name, (_, second) in parts.items()}
    mix = kls(made("mix", options), measured, options)
    print(
        "| calibration | text | mix | blend | alone | blend / mix | blend / alone |\n|---|---|---|---|---|---|---|"
    )
    for name in (text.stem for text in options.narrow):
        own = {"calibration": parts[name][0]}
        blend = kls(made(f"{name}-blend", options, **own), measured, options)
        alone = kls(made(f"{name}-alone", options, **own, calibration_only=True), measured, options)
        for text in measured:
            print(
                f"| {name} | {text} | {mix[text]:.4f} | {blend[text]:.4f} | {alone[text]:.4f} | "
                f"{blend[text] / mix[text]:.2f} | {blend[text] / alone[text]:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
