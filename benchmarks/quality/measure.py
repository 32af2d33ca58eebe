"""Measures every contestant in the same way: `ciuic eval` against the original, on each text."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contestants import OURS, Contestant
from runs import Failure, Made, Workshop, contents, digest, run


@dataclass(frozen=True)
class Text:
    """A text to evaluate on, by the name that the tables show."""

    name: str
    file: Path


@dataclass(frozen=True)
class Measure:
    """The texts, tokens per window, and windows per text at most (None: all), the same for every contestant."""

    texts: tuple[Text, ...]
    seqlen: int
    limit: int | None

    def evaluation(self, workshop: Workshop, made: Made, slug: str, text: Text) -> dict[str, Any]:
        """The report of `ciuic eval --json` for a model on a text, kept once measured. Raises Failure("evaluate")."""
        key = digest(made.key, contents(text.file), self.seqlen, self.limit)
        kept = workshop.folder / "evaluations" / f"{slug}.{text.name}.{key}.json"
        if not kept.is_file():
            command: list[Any] = [sys.executable, "-m", "ciuic_cli", "eval", made.folder]
            command += ["--base", workshop.model, "--text", text.file, "--seqlen", self.seqlen, "--json"]
            command += [] if self.limit is None else ["--limit", self.limit]
            log, printed = kept.with_suffix(".log"), kept.with_suffix(".unfinished")
            run(command, log, "evaluate", workshop.threads, printed)
            printed.rename(kept)
            log.unlink()
        return dict(json.loads(kept.read_text()))

    def row(self, workshop: Workshop, contestant: Contestant, parameters: int) -> dict[str, Any]:
        """Make and measure one contestant. If a step fails, the row has its name (`step`) and the reason (`failed`)."""
        row: dict[str, Any] = {"name": contestant.name, "tool": contestant.tool}
        row |= {"ours": contestant.tool == OURS}
        row |= {"curve": contestant.curve, "texts": {}}
        try:
            made = workshop.make(contestant)
            row |= {"bytes": made.stored, "bpw": 8 * made.stored / parameters}
            for text in self.texts:
                row["texts"][text.name] = self.evaluation(workshop, made, contestant.slug, text)
        except Failure as failure:
            row |= {"step": failure.step, "failed": str(failure)}
        return row

    def described(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Name, tokens, window length and the original's perplexity of every text with a measurement."""
        found = []
        for text in self.texts:
            one = next((row["texts"][text.name] for row in rows if text.name in row["texts"]), None)
            if one is not None:
                found.append(
                    {"name": text.name} | {k: one[k] for k in ("tokens", "seqlen", "base_perplexity")}
                )
        return found


def measure_all(
    workshop: Workshop,
    measure: Measure,
    contestants: Sequence[Contestant],
    parameters: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Make and measure all contestants, report each through `say` as it ends, and return the results."""
    rows: list[dict[str, Any]] = []
    for number, contestant in enumerate(contestants):
        row = measure.row(workshop, contestant, parameters)
        rows.append(row)
        parts = [f"{row['bpw']:.3f} bits per weight"] if "bpw" in row else []
        parts += [f"{text}: KL {found['kl_mean']:.4f}" for text, found in row["texts"].items()]
        parts += [f"{row['step']} failed: {row['failed']}"] if "failed" in row else []
        say(f"[{number + 1}/{len(contestants)}] {row['name']}: {'; '.join(parts)}")
    return {
        "parameters": parameters,
        "calibration": list(workshop.tokens.shape),
        "texts": measure.described(rows),
        "contestants": rows,
    }
