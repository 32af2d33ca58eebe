"""Planned beside measured memory of training steps, for models of which only a config is needed.

    python benchmarks/plan_accuracy.py FOLDER ... [--rows 2] [--tokens 384] [--strategies "4-bit states" ...]

FOLDER has a config.json, and weights or not. `ciuic plan FOLDER --measure` shows the same of all strategies.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path

from ciuic_cli.train.planning.comparison import compared
from ciuic_cli.train.planning.memory_plan import PlannedModel
from ciuic_cli.train.planning.strategies import plan_strategies


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--strategies", nargs="*", help="names in the table of `ciuic plan`; default: all")
    options = parser.parse_args()
    print(
        "| model | strategy | planned MB | measured MB | ratio | planned resident MB | resident MB | ratio |"
    )
    print("|---|---|---|---|---|---|---|---|")
    tensors, resident = [], []
    for folder in options.folders:
        planned = plan_strategies(
            PlannedModel.of_folder(folder), limit=1 << 40, gpus=[1, 2], tokens=options.tokens,
            rows=options.rows, rank=16, process=0,
        )  # fmt: skip
        chosen = [one for one in planned if not options.strategies or one.strategy.name in options.strategies]
        if not chosen:
            parser.error(f"no such strategy: there are {', '.join(one.strategy.name for one in planned)}")
        for one in chosen:
            (row,) = compared(folder, [one], options.tokens, lambda *_: None, partial(print, file=sys.stderr))
            if row is not None:
                tensors.append(row["planned"] / row["peak"])
                resident.append(row["planned_resident"] / row["resident"])
                megabytes = [
                    f"{row[name] / 1e6:,.1f}" for name in ("planned", "peak", "planned_resident", "resident")
                ]
                print(
                    f"| {folder.name} | {one.strategy.name} | {megabytes[0]} | {megabytes[1]} | "
                    f"{tensors[-1]:.3f} | {megabytes[2]} | {megabytes[3]} | {resident[-1]:.3f} |",
                    flush=True,
                )
    for name, ratios in (("tensors", tensors), ("resident memory", resident)):
        errors = [abs(ratio - 1) for ratio in ratios]
        print(f"{name}: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}")


if __name__ == "__main__":
    main()
