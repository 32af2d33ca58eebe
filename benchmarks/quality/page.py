"""The measured part of docs/QUALITY.md: tables from results, written between two markers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""One contestant: name, tool, ours, curve, bpw, texts (by name: what `ciuic eval` found); where it failed: step and
failed."""


def markers(part: str) -> tuple[str, str]:
    return f"<!-- {part}: begin (benchmarks/quality/compare.py) -->", f"<!-- {part}: end -->"


def replace_part(page: str, part: str, content: str) -> str:
    """The page with what stands between a part's markers replaced; raises ValueError if it lacks them."""
    begin, end = markers(part)
    head, found, rest = page.partition(begin)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"the page has no part {part!r}: it needs the lines {begin!r} and {end!r}")
    return f"{head}{begin}\n{content.strip()}\n{end}{tail}"


def bits_for(divergence: float, curve: Sequence[tuple[float, float]]) -> float | None:
    """Bits per weight at which a curve of (bits per weight, KL) reaches a KL: log KL is linear between points.

    None outside the curve, or where it has no two points.
    """
    points = sorted(curve)
    for (low, worse), (high, better) in itertools.pairwise(points):
        if worse >= divergence >= better > 0 and worse > better:
            share = math.log(worse / divergence) / math.log(worse / better)
            return low + share * (high - low)
    return None


def ahead(rows: Sequence[Row], text: str) -> list[tuple[str, str]]:
    """Pairs (peer, ours) where the peer takes no more bits than ours and has the lower KL on a text."""
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


def figures(found: dict[str, Any]) -> str:
    """Cells of one evaluation: KL, perplexity over the original's, same most likely token."""
    return (
        f"{found['kl_mean']:.4f} ± {found['kl_stderr']:.4f} | "
        f"{found['perplexity_ratio']:.4f} ± {found['perplexity_ratio_stderr']:.4f} | "
        f"{100 * found['top1_agreement']:.2f} %"
    )


def text_table(rows: Sequence[Row], text: str) -> str:
    """All contestants on one text, smallest first; what failed has its line below the others."""
    measured = sorted((row for row in rows if text in row["texts"]), key=lambda row: row["bpw"])
    curve = [(row["bpw"], row["texts"][text]["kl_mean"]) for row in measured if row["curve"]]
    lines = [
        "| | bits per weight | KL | perplexity ratio | same token | this tool's bits for that KL |",
        "|---|---|---|---|---|---|",
    ]
    for row in measured:
        found = row["texts"][text]
        name = f"**{row['name']}**" if row["ours"] else row["name"]
        bits = None if row["ours"] else bits_for(found["kl_mean"], curve)
        equal = "" if bits is None else f"{bits:.2f}"
        lines.append(f"| {name} | {row['bpw']:.3f} | {figures(found)} | {equal} |")
    return "\n".join(lines)


def verdict(rows: Sequence[Row], text: str) -> str:
    """One sentence: which peers were better than this tool at no more bits."""
    own = [row for row in rows if row["ours"] and text in row["texts"]]
    if not own:
        return ""
    pairs = ahead(rows, text)
    if not pairs:
        return "No peer has a lower KL than this tool at as many bits or fewer."
    named = ", ".join(f"{peer} (against {mine})" for peer, mine in pairs)
    return f"Better than this tool at as many bits or fewer: {named}."


def failures(rows: Sequence[Row]) -> str:
    """A list of what could not be measured, and why."""
    failed = [row for row in rows if "failed" in row]
    if not failed:
        return ""
    lines = [
        f"- {row['name']}: {row['step']} failed: `{row['failed'].replace('`', chr(39))}`" for row in failed
    ]
    return "Not measured:\n\n" + "\n".join(lines)


def setting(results: dict[str, Any]) -> str:
    """What was run: the command, the model, the calibration."""
    sequences, length = results["calibration"]
    return (
        f"`{results['command']}`\n\n{results['parameters']:,} stored parameters; {sequences} calibration sequences of "
        f"{length} tokens, the same ones for every tool that calibrates. Bits per weight: 8 times the bytes of all "
        "stored tensors, embeddings, scales and indices included, over the original's stored parameters."
    )


def comparison(results: dict[str, Any], plot: str | None) -> str:
    """The whole measured part: setting, plot, one section per text, failures."""
    rows = results["contestants"]
    parts = [setting(results)]
    if plot:
        parts.append(f"![KL divergence against bits per weight]({plot})")
    for text in results["texts"]:
        parts.append(
            f"### {text['name']}: {text['tokens']:,} tokens in windows of {text['seqlen']}\n\n"
            f"Perplexity of the original {text['base_perplexity']:.3f}. {verdict(rows, text['name'])}".strip()
        )
        parts.append(text_table(rows, text["name"]))
    parts.append(failures(rows))
    return "\n\n".join(part for part in parts if part)


def ablation(results: dict[str, Any]) -> str:
    """One table per text, in the order of the contestants: KL, and its ratio to the first one's (all switched on)."""
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
            lines.append(f"| {row['name']} | {row['bpw']:.3f} | {figures(found)} | {change:.3f} |")
        parts.append("\n".join(lines))
    parts.append(failures(results["contestants"]))
    return "\n\n".join(part for part in parts if part)


def write(page: Path, part: str, content: str) -> None:
    """Put `content` between the markers of `part` in the page; raises ValueError if it lacks them."""
    page.write_text(replace_part(page.read_text(encoding="utf-8"), part, content), encoding="utf-8")
