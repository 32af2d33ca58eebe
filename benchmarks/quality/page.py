"""Writes results into documents: tables between two marker lines, the rest of the document untouched."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""One contestant: name, tool, ours, curve, bpw, texts (by name: the report of `ciuic eval`). A contestant that failed
has step and failed instead of bpw or of some texts."""
TEXTS_PER_TABLE = 6
"""Columns of texts in one table; with the contestant's name a table has at most seven columns. Chosen."""


def markers(part: str) -> tuple[str, str]:
    """The lines before and after a generated part of a document."""
    return f"<!-- {part}: begin (benchmarks/quality/compare.py) -->", f"<!-- {part}: end -->"


def replace_part(page: str, part: str, content: str) -> str:
    """The page with new content between a part's markers. Raises ValueError if the page lacks them."""
    begin, end = markers(part)
    head, found, rest = page.partition(begin)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"the page has no part {part!r}: it needs the lines {begin!r} and {end!r}")
    return f"{head}{begin}\n{content.strip()}\n{end}{tail}"


def bits_for(divergence: float, curve: Sequence[tuple[float, float]]) -> float | None:
    """Bits per weight at which a curve of (bits per weight, KL) reaches a KL; log KL is linear between points.

    Returns None outside the curve, or if the curve has fewer than two points.
    """
    points = sorted(curve)
    for (low, worse), (high, better) in itertools.pairwise(points):
        if worse >= divergence >= better > 0 and worse > better:
            share = math.log(worse / divergence) / math.log(worse / better)
            return low + share * (high - low)
    return None


def ahead(rows: Sequence[Row], text: str) -> list[tuple[str, str]]:
    """Pairs (peer, ours) where the peer has no more bits per weight than ours and a lower KL on a text."""
    measured = [row for row in rows if text in row["texts"]]
    return [
        (peer["name"], own["name"])
        for own in measured
        for peer in measured
        if own["ours"]
        and not peer["ours"]
        and peer["bpw"] <= own["bpw"]
        and peer["texts"][text]["kl_mean"] < own["texts"][text]["kl_mean"]
    ]


def verdict(rows: Sequence[Row], texts: Sequence[str]) -> str:
    """One sentence on the texts that this tool was measured on: which peers were better at no more bits per weight."""
    texts = [text for text in texts if any(row["ours"] and text in row["texts"] for row in rows)]
    if not texts:
        return ""
    better = {text: ahead(rows, text) for text in texts}
    if not any(better.values()):
        return f"No peer has a lower KL than `ciuic` at as many bits or fewer ({_counted(texts)})."
    named = [
        f"{text}: {', '.join(f'{peer} (against {mine})' for peer, mine in pairs)}"
        for text, pairs in better.items()
        if pairs
    ]
    return f"Better than `ciuic` at as many bits or fewer: {'; '.join(named)}."


def _counted(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{len(texts)} texts"


def setting(results: dict[str, Any]) -> str:
    """The command, the model's size, the calibration text, and what bits per weight are."""
    sequences, length = results["calibration"]
    return (
        f"`{results['command']}`\n\n{results['parameters']:,} stored parameters; {sequences} calibration sequences of "
        f"{length} tokens, the same ones for every tool that calibrates. Bits per weight: 8 times the bytes of all "
        "stored tensors, embeddings, scales and indices included, over the original's stored parameters."
    )


def failures(rows: Sequence[Row]) -> str:
    """A list of the contestants that were not measured, each with the step that failed and the reason."""
    failed = [row for row in rows if "failed" in row]
    if not failed:
        return ""
    lines = [
        f"- {row['name']}: {row['step']} failed: `{row['failed'].replace('`', chr(39))}`" for row in failed
    ]
    return "Not measured:\n\n" + "\n".join(lines)


def comparison(results: dict[str, Any], plot: str | None) -> str:
    """The summary: setting, plot, verdict, KL of every contestant on every text, failures."""
    rows, texts = results["contestants"], [text["name"] for text in results["texts"]]
    parts = [setting(results)]
    if plot:
        parts.append(f"![KL divergence against bits per weight]({plot})")
    tokens = {
        text["name"]: f"{text['tokens']:,} tokens in windows of {text['seqlen']:,}"
        for text in results["texts"]
    }
    same_length = len(set(tokens.values())) == 1
    for first in range(0, len(texts), TEXTS_PER_TABLE):
        shown = texts[first : first + TEXTS_PER_TABLE]
        where = (
            f"{tokens[shown[0]]} each"
            if same_length
            else ", ".join(f"{text} {tokens[text]}" for text in shown)
        )
        parts.append(f"KL in nats per token, smallest model first ({where}). {verdict(rows, shown)}")
        parts.append(divergence_table(rows, shown))
    parts.append(failures(rows))
    return "\n\n".join(part for part in parts if part)


def divergence_table(rows: Sequence[Row], texts: Sequence[str]) -> str:
    """Mean KL of every contestant on some texts, sorted by bits per weight."""
    lines = ["| bits per weight, tool | " + " | ".join(texts) + " |", "|---" * (len(texts) + 1) + "|"]
    for row in sorted((row for row in rows if row["texts"]), key=lambda row: row["bpw"]):
        cells = [f"{row['texts'][text]['kl_mean']:.4f}" if text in row["texts"] else "" for text in texts]
        lines.append(f"| {row['bpw']:.3f} {_shown(row)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tables(results: dict[str, Any]) -> str:
    """The details: one section per text with KL, perplexity and agreement of every contestant."""
    rows = results["contestants"]
    parts = [setting(results)]
    for text in results["texts"]:
        parts.append(
            f"### {text['name']}: {text['tokens']:,} tokens in windows of {text['seqlen']}\n\n"
            f"Perplexity of the original {text['base_perplexity']:.3f}. {verdict(rows, [text['name']])}"
        )
        parts.append(text_table(rows, text["name"]))
    parts.append(failures(rows))
    return "\n\n".join(part for part in parts if part)


def text_table(rows: Sequence[Row], text: str) -> str:
    """Every contestant on one text, sorted by bits per weight. The last column is the bits per weight at which this
    tool's curve has a peer's KL."""
    measured = sorted((row for row in rows if text in row["texts"]), key=lambda row: row["bpw"])
    curve = [(row["bpw"], row["texts"][text]["kl_mean"]) for row in measured if row["curve"]]
    lines = [
        "| | bits per weight | KL | perplexity ratio | same token | this tool's bits for that KL |",
        "|---|---|---|---|---|---|",
    ]
    for row in measured:
        found = row["texts"][text]
        bits = None if row["ours"] else bits_for(found["kl_mean"], curve)
        equal = "" if bits is None else f"{bits:.2f}"
        lines.append(f"| {_shown(row)} | {row['bpw']:.3f} | {_cells(found)} | {equal} |")
    return "\n".join(lines)


def _shown(row: Row) -> str:
    return f"**{row['name']}**" if row["ours"] else str(row["name"])


def _cells(found: dict[str, Any]) -> str:
    """Cells of one evaluation: KL, perplexity over the original's, same most likely token."""
    return (
        f"{found['kl_mean']:.4f} ± {found['kl_stderr']:.4f} | "
        f"{found['perplexity_ratio']:.4f} ± {found['perplexity_ratio_stderr']:.4f} | "
        f"{100 * found['top1_agreement']:.2f} %"
    )


def ablation(results: dict[str, Any]) -> str:
    """One table per text, in the contestants' order, with each KL over that of the first row (everything on)."""
    parts = [setting(results)]
    for text in [text["name"] for text in results["texts"]]:
        lines = [
            f"| {text} | bits per weight | KL | perplexity ratio | same token | KL over the first row's |",
            "|---|---|---|---|---|---|",
        ]
        measured = [row for row in results["contestants"] if text in row["texts"]]
        for row in measured:
            found = row["texts"][text]
            change = found["kl_mean"] / measured[0]["texts"][text]["kl_mean"]
            lines.append(f"| {row['name']} | {row['bpw']:.3f} | {_cells(found)} | {change:.3f} |")
        parts.append("\n".join(lines))
    parts.append(failures(results["contestants"]))
    return "\n\n".join(part for part in parts if part)


def write(page: Path, part: str, content: str) -> None:
    """Put `content` between the markers of `part` in the page. Raises ValueError if the page lacks them."""
    page.write_text(replace_part(page.read_text(encoding="utf-8"), part, content), encoding="utf-8")
