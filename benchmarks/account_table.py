"""Prints the accounts of runs as tables in Markdown, for docs/PERFORMANCE.md.

    ciuic compress MODEL OUT --profile --json > run.json
    python benchmarks/account_table.py run.json

Lines with less than a hundredth of a run's seconds are added up in one, "others".
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

LEAST_SHARE = 0.01
"""Share of a run's seconds from which on a line is shown (chosen)."""


def table_of(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of Markdown. rows: the `profile` of a report, each with the fields of `AccountRow`."""
    total = sum(row["seconds"] for row in rows)
    shown = [row for row in rows if row["seconds"] >= LEAST_SHARE * total]
    others = [row for row in rows if row["seconds"] < LEAST_SHARE * total]
    lines = [
        "| phase | step | matrices | G operations | GB | seconds | of the peak |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    lines += [_line(row["phase"], row["step"], row["kind"], [row], row["share"]) for row in shown]
    lines += [_line("others", "", "", others, None), _line("**all**", "", "", rows, None)]
    return lines


def _line(phase: str, step: str, kind: str, rows: list[dict[str, Any]], share: float | None) -> str:
    operations, nbytes, seconds = (
        sum(row[name] for row in rows) for name in ("operations", "bytes", "seconds")
    )
    of_peak = "" if share is None else f"{share:.0%}".replace("%", " %")
    return f"| {phase} | {step} | {kind} | {operations / 1e9:,.0f} | {nbytes / 1e9:,.0f} | {seconds:,.1f} | {of_peak} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reports", type=Path, nargs="+")
    for report in parser.parse_args().reports:
        print(f"{report.stem}\n", *table_of(json.loads(report.read_text())["profile"]), "", sep="\n")


if __name__ == "__main__":
    main()
