"""KL of GGUF files by ciuic's plan and by llama-quantize, measured by llama.cpp.

    python benchmarks/gguf_quality.py MODEL WORK --llama-cpp DIR --text NAME=FILE ... \\
        --compare 4.5=IQ3_M:iq4_nl --compare 3.5=Q2_0 [--nsamples 8] [--chunks 2] [--without TYPE]

--compare BITS=PRESET[:EMBEDDING[:HEAD]]: llama-quantize writes the preset, with other types for the embedding and the
head if they are named, and an importance matrix that llama-imatrix makes from the same text as ciuic's statistics.
ciuic's file gets no more bytes than the preset's, and its tensors no more than BITS per weight, whichever is less.
BITS does not count the tokenizer and other metadata, which both files have; llama-quantize's messages count alike.

--without TYPE: the plan does not use or price this type; may be repeated. The weights of a model of packaged_model.py
lie on the grids of the GGUF file that it comes from, so types with these grids would round them without an error.

llama-perplexity compares with the bfloat16 file on each text and gives the standard error of each mean. That of the
saving takes the errors of both files as independent, and so is too large: both are measured on the same tokens. WORK
keeps all files and results; the same command continues after a stop.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

CONTEXT = 512
"""Tokens per chunk of llama-perplexity, which measures the second half of each."""
TRIES = 20
"""Runs of llama-perplexity for one result (chosen). A thread of its own writes its log, and sometimes the program
ends before the last lines, with exit code 0."""


def run(*command: object) -> str:
    """The output of a program; exits with it if the program fails."""
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode:
        raise SystemExit(f"{command[0]} failed:\n{done.stdout[-3000:]}")
    return done.stdout


class Comparison:
    """One model, its files in `work`, and the results in `results.json` there."""

    def __init__(self, options: argparse.Namespace) -> None:
        from ciuic_cli.checkpoint.model_map import map_model
        from ciuic_cli.checkpoint.reader import open_checkpoint
        from ciuic_cli.export.gguf.llama_cpp import find_llama_cpp
        from ciuic_cli.export.gguf.writing import GgufOptions, calibration_text

        self.work, self.chunks, self.without = options.work, options.chunks, set(options.without)
        self.work.mkdir(parents=True, exist_ok=True)
        self.model = options.model
        self.programs = find_llama_cpp(options.llama_cpp)
        self.map = map_model(open_checkpoint(self.model))
        self.settings = GgufOptions(nsamples=options.nsamples)
        self.calibration = calibration_text(self.map, self.settings)
        self.texts = dict(item.split("=", 1) for item in options.text)
        self._results_file = self.work / "results.json"
        self.results = json.loads(self._results_file.read_text()) if self._results_file.exists() else {}

    def planner(self) -> Any:
        from ciuic_cli.export.gguf.writing import GgufPlanner

        folder = self.work / "planner"
        subprocess.run(["rm", "-rf", folder], check=True)
        folder.mkdir()
        return GgufPlanner(
            self.map, self.calibration, folder, self.programs, device=torch.device("cpu"), without=self.without,
            progress=lambda *step: print(*step, flush=True),
        )  # fmt: skip

    def original(self) -> Path:
        """The converted checkpoint."""
        path = self.work / "original.gguf"
        if not path.exists():
            self.programs.convert(self.model, path)
        return path

    def program(self, name: str) -> Path:
        return self.programs.quantizer.with_name(name)

    def importance(self) -> Path:
        """llama.cpp's importance matrix of the calibration text."""
        from transformers import AutoTokenizer

        path = self.work / "imatrix.gguf"
        if not path.exists():
            text = self.work / "calibration.txt"
            tokenizer = AutoTokenizer.from_pretrained(self.model)
            text.write_text(
                "\n".join(tokenizer.batch_decode(self.calibration.tokens, skip_special_tokens=True))
            )
            run(
                self.program("llama-imatrix"), "-m", self.original(), "-f", text, "-c", CONTEXT, "-o", path,
                "--process-output", "--no-ppl",
            )  # fmt: skip
        return path

    def preset(self, wanted: str) -> Path:
        """llama-quantize's file of PRESET[:EMBEDDING[:HEAD]]."""
        path = self.work / f"{wanted.replace(':', '-')}.gguf"
        if not path.exists():
            name, *kinds = wanted.split(":")
            options = zip(("--token-embedding-type", "--output-tensor-type"), kinds, strict=False)
            other = [part for option, kind in options if kind for part in (option, kind)]
            run(self.programs.quantizer, "--imatrix", self.importance(), *other, self.original(), path, name)
        return path

    def kls(self, file: Path) -> dict[str, list[float]]:
        """By name of the text: KL in nats per token, and its standard error."""
        found = self.results.setdefault(file.name, {})
        for name, text in self.texts.items():
            if name in found:
                continue
            logits = self.work / f"{name}.logits"
            command = [self.program("llama-perplexity"), "-f", text, "-c", CONTEXT, "--chunks", self.chunks]
            if not logits.exists():
                run(*command, "-m", self.original(), "--kl-divergence-base", logits)
            for _ in range(TRIES):
                printed = run(*command, "-m", file, "--kl-divergence-base", logits, "--kl-divergence")
                match = re.search(r"Mean\s+KLD:\s+(-?[\d.]+) ±\s+([\d.]+)", printed)
                if match:
                    break
            else:
                raise SystemExit(printed[-3000:])
            found[name] = [float(match[1]), float(match[2])]
            self._results_file.write_text(json.dumps(self.results, indent=1))
            print(file.name, name, *found[name], flush=True)
        return found


def saving(theirs: list[float], ours: list[float]) -> str:
    """By how much the second KL is below the first, with its standard error, in percent."""
    ratio = ours[0] / theirs[0]
    error = ratio * math.hypot(ours[1] / ours[0], theirs[1] / theirs[0])
    return f"{100 * (1 - ratio):.0f} ± {100 * error:.0f} %"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--llama-cpp", type=Path)
    parser.add_argument("--text", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--compare", action="append", required=True, metavar="BITS=PRESET[:EMBEDDING[:HEAD]]")
    parser.add_argument("--nsamples", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--without", action="append", default=[], metavar="TYPE")
    options = parser.parse_args()
    comparison = Comparison(options)
    planner = None
    rows = []
    for item in options.compare:
        target, wanted = item.split("=")
        theirs = comparison.preset(wanted)
        ours = comparison.work / f"ours-{target}-{wanted.replace(':', '-')}.gguf"
        if not ours.exists():
            planner = planner or comparison.planner()
            source = planner.source
            most = min(float(target) * source.weights / 8 + source.metadata_bytes, theirs.stat().st_size)
            written = planner.write(ours, 8 * most / source.weights)
            print(ours.name, written.bits, written.predicted_kl, written.shares, flush=True)
        rows.append((target, theirs, ours))
    print("| target | file | bytes | " + " | ".join(comparison.texts) + " |")
    for target, theirs, ours in rows:
        kls = {file: comparison.kls(file) for file in (theirs, ours)}
        for file, found in kls.items():
            shown = " | ".join("{:.4f} ± {:.4f}".format(*found[name]) for name in comparison.texts)
            print(f"| {target} | {file.stem} | {file.stat().st_size} | {shown} |", flush=True)
        saved = " | ".join(saving(kls[theirs][name], kls[ours][name]) for name in comparison.texts)
        print(f"| {target} | saved | {1 - ours.stat().st_size / theirs.stat().st_size:.2%} | {saved} |")


if __name__ == "__main__":
    main()
