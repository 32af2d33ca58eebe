"""`ciuic` against other quantizers on the same model and text, each at the size that it really takes.

    python benchmarks/quality/compare.py MODEL --page PAGE --tables TABLES   all peers, and this tool at 2 to 6 bits
    python benchmarks/quality/compare.py MODEL --ablation --page PAGE        this tool with one idea off at a time

Each peer runs in its own environment below --out, made from pinned requirements on first use. It quantizes MODEL with
its own code and the same calibration tokens, keeps its own files, whose tensors are counted, and writes a dequantized
float32 checkpoint. `ciuic eval` then measures every contestant against MODEL in the same way. Finished steps are kept:
the same command continues after a stop. A peer that does not install or does not finish is listed with the reason.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import json
import shlex
import sys
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import ablation
import page as document
from contestants import AUTOROUND_ITERATIONS, OURS, PEERS, Contestant, ours, peers
from measure import Measure, Text, measure_all
from runs import Workshop

from ciuic_cli.checkpoint.model_map import map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.text.calibration import calibration_batch
from ciuic_cli.text.tokenizer import open_tokenizer

BITS = (2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0)
"""This tool's targets in bits per weight. Chosen: the sizes of the peers lie between them."""
CALIBRATION_LENGTH = 512
"""Tokens per calibration sequence: the default of `ciuic compress`."""
ABLATION_BITS = 4.0


def named(text: str) -> tuple[str, str]:
    """Split NAME=VALUE. Raises argparse's error for anything else."""
    name, found, value = text.partition("=")
    if not (name and found and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not written NAME=VALUE")
    return name, value


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="dense checkpoint folder (safetensors)")
    add("--out", type=Path, default=Path("build/quality"), help="folder for models, environments and results")
    add("--text", type=named, action="append", metavar="NAME=FILE",
        help="text to evaluate on (repeatable); default: the package's own evaluation text")  # fmt: skip
    add("--limit", type=int, help="windows per text at most (default: all)")
    add("--seqlen", type=int, default=1024, help="tokens per evaluation window")
    add("--calibration", type=Path, metavar="FILE", help="text to calibrate on; default: the package's own")
    add("--nsamples", type=int, default=64, help=f"calibration sequences of {CALIBRATION_LENGTH} tokens")
    add("--bits", type=float, nargs="*", default=list(BITS), help="this tool's targets")
    add("--best", type=float, nargs="*", default=[4.0], metavar="BITS", help="its targets with --effort best")
    add("--ours", type=named, action="append", default=[], metavar="ROW=FOLDER",
        help='a finished artifact for a row of this tool, named as in the tables: "4", "4, best"')  # fmt: skip
    add("--tools", nargs="*", default=[*PEERS], choices=[*PEERS], help="peers that take part")
    add("--only", nargs="*", default=["*"], metavar="PATTERN", help="contestants whose name matches one")
    add("--autoround-iterations", type=int, default=AUTOROUND_ITERATIONS)
    add("--ablation", action="store_true", help="instead: this tool with each idea off in turn")
    add("--threads", type=int, help="threads of every step (default: the libraries' own)")
    add("--page", type=Path, help="document whose generated part is written, the plot beside it")
    add("--tables", type=Path, help="document for the tables text by text")
    chosen = parser.parse_args()
    if chosen.page and not chosen.ablation and importlib.util.find_spec("matplotlib") is None:
        parser.error("--page draws a plot with matplotlib: pip install '.[bench]'")
    rows = [one.name.removeprefix(f"{OURS} ") for one in candidates(chosen) if one.tool == OURS]
    for row, folder in chosen.ours:
        if row not in rows:
            parser.error(f"--ours {row}: the rows are {', '.join(map(repr, rows))}")
        if not (Path(folder) / "config.json").is_file():
            parser.error(f"--ours {row}: {folder} is no artifact")
    for _, file in chosen.text or ():
        if not Path(file).is_file():
            parser.error(f"--text: there is no file {file}")
    return chosen


def candidates(chosen: argparse.Namespace) -> list[Contestant]:
    """All contestants before --only selects from them."""
    if chosen.ablation:
        return ablation.variants(ABLATION_BITS)
    taking_part = [peer for peer in peers(chosen.autoround_iterations) if peer.tool in chosen.tools]
    return ours(chosen.bits, chosen.best) + taking_part


def contestants(chosen: argparse.Namespace) -> list[Contestant]:
    """The contestants that --only selects; those of --ours with their finished artifact."""
    finished = {f"{OURS} {row}": str(Path(folder).resolve()) for row, folder in chosen.ours}
    return [
        replace(one, options={"folder": finished[one.name]}) if one.name in finished else one
        for one in candidates(chosen)
        if any(fnmatch.fnmatch(one.name, pattern) for pattern in chosen.only)
    ]


def publish(results: dict[str, Any], page: Path, tables: Path | None) -> None:
    """Write the comparison into `page`, a plot named after the page beside it, and details into `tables`."""
    import plot

    panels = [(text["name"], plot.points(results["contestants"], text["name"])) for text in results["texts"]]
    drawing = page.with_name(f"{page.stem.lower()}.svg")
    plot.write(panels, drawing)
    document.write(page, "comparison", document.comparison(results, drawing.name))
    if tables:
        document.write(tables, "tables", document.tables(results))


def shown(chosen: argparse.Namespace) -> str:
    """The command as the page shows it: the options that decide figures, and file names without folders."""
    parts = ["python", "benchmarks/quality/compare.py", chosen.model.name, f"--seqlen={chosen.seqlen}"]
    parts += [f"--text={name}={Path(file).name}" for name, file in chosen.text or ()]
    parts += [f"--calibration={chosen.calibration.name}"] if chosen.calibration else []
    parts += [f"--limit={chosen.limit}"] if chosen.limit else []
    parts += ["--ablation"] if chosen.ablation else []
    parts += ["--only", *chosen.only] if chosen.only != ["*"] else []
    return shlex.join(parts)


def main() -> int:
    chosen = arguments()
    model_map = map_model(open_checkpoint(chosen.model))
    tokens = calibration_batch(
        open_tokenizer(chosen.model),
        [chosen.calibration] if chosen.calibration else (),
        nsamples=chosen.nsamples,
        seqlen=CALIBRATION_LENGTH,
        vocab_size=model_map.config.get_text_config().vocab_size,
    )
    own_text = Path(str(resources.files("ciuic_cli").joinpath("text/data/eval.txt")))
    texts = [Text(name, Path(file)) for name, file in chosen.text or [("mixed", str(own_text))]]
    calibration = chosen.calibration.resolve() if chosen.calibration else None
    workshop = Workshop(chosen.out.resolve(), chosen.model.resolve(), tokens, chosen.threads, calibration)
    results = {"command": shown(chosen)} | measure_all(
        workshop,
        Measure(tuple(texts), chosen.seqlen, chosen.limit),
        contestants(chosen),
        model_map.stored_numel,
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    name = "ablation.json" if chosen.ablation else "comparison.json"
    (workshop.folder / name).write_text(json.dumps(results, indent=1))
    if chosen.page and chosen.ablation:
        document.write(chosen.page, "ablation", document.ablation(results))
    elif chosen.page:
        publish(results, chosen.page, chosen.tables)
    print(workshop.folder / name)
    return 0 if results["texts"] else 1


if __name__ == "__main__":
    sys.exit(main())
