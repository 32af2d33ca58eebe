"""Kills `ciuic merge` and checks what is left: `python tests/faults/campaigns/killing_merging.py --kills 20`.

A tiny model is compressed and gets an adapter. Then merges by each method are killed at a random moment, or at their
n-th write access to the folder of the output, some several times. Afterwards there must be no output, or a complete
one. The same command must then end with the same bytes as an undisturbed merge.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import peft
from forked_runs import SIGNALS, ForkedRuns

from ciuic_cli.compression.options import EFFORTS
from ciuic_cli.compression.pipeline import compress
from ciuic_cli.train import engine, trainer
from ciuic_cli.train.merging.merge import METHODS, merge

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS)]  # for the checkpoint that all tests share

COMPRESS = ("--ratio", "3", "--nsamples", "2", "--seqlen", "128", "--effort", "fast", "--device", "cpu")
TRAIN = (
    "--sequence-len",
    "64",
    "--max-steps",
    "4",
    "--lora-r",
    "2",
    "--learning-rate",
    "5e-3",
    "--device",
    "cpu",
)
DIFFERS = ("memory_report.json", "memory_report.html", "ciuic_checksums.json")
"""Files that differ between equal runs: they contain run times, or checksums of such files."""
SEQUENCES = 2
"""Calibration sequences of "requantize", which takes those of the effort level otherwise."""
MOST_KILLS = 3
"""Most kills of one merge (chosen)."""


class Harness:
    """An artifact and an adapter, the outputs of undisturbed merges by each method, and counts of outcomes."""

    def __init__(self, folder: Path, seed: int) -> None:
        assert (
            compress and peft and engine and trainer and merge
        )  # imported before the forks, which inherit them
        from tiny_checkpoints import make_checkpoint

        EFFORTS["fast"] = replace(EFFORTS["fast"], nsamples=SEQUENCES)
        self.random, self.counts, self.killed = random.Random(seed), Counter[str](), 0
        self.folder, self.place = folder, folder / "place"
        self.out = self.place / "merged"
        data = folder / "train.jsonl"
        lines = [{"prompt": f"The number after {n} is ", "completion": f"{n + 1}."} for n in range(1, 20)]
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        text = folder / "text.txt"
        text.write_text("the quick brown fox jumps over the lazy dog; " * 20)
        model = make_checkpoint("llama_tied", folder / "model", num_hidden_layers=1)
        artifact, adapter = str(folder / "artifact"), str(folder / "adapter")
        self._must_end(
            "compress", str(model), artifact, "--calibration", str(text), "--calibration-only", *COMPRESS
        )
        self._must_end("train", artifact, adapter, "--train-file", str(data), *TRAIN)
        self.runs, self.seconds = dict[str, ForkedRuns](), dict[str, float]()
        self.accesses, self.expected = dict[str, int](), dict[str, dict[str, bytes]]()
        for method in METHODS:
            words = ["merge", artifact, adapter, str(self.out), "--train-file", str(data), "--method", method]
            self.runs[method] = self._runs(method, [*words, "--device", "cpu"])
            self.place.mkdir()
            log, started = folder / "accesses", time.monotonic()
            code = self.runs[method].wait(self.runs[method].start(count_in=log))
            assert code == 0, self.runs[method].said()
            self.seconds[method], self.accesses[method] = time.monotonic() - started, int(log.read_text())
            self.expected[method] = self.bytes_of_output()
            shutil.rmtree(self.place)

    def _runs(self, name: str, words: list[str]) -> ForkedRuns:
        folder = self.folder / f"of-{name}"
        folder.mkdir()
        return ForkedRuns(folder, self.place, words)

    def _must_end(self, *words: str) -> None:
        runs = self._runs(words[0], list(words))
        assert runs.wait(runs.start()) == 0, runs.said()

    def bytes_of_output(self) -> dict[str, bytes]:
        """The files of the output. A half-written output lacks some."""
        files = [path for path in self.out.rglob("*") if path.is_file()]
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in files}
        return {path.name: path.read_bytes() for path in files if path.name not in DIFFERS}

    def require_expected(self, method: str) -> None:
        """Raise AssertionError if the output is not that of an undisturbed merge."""
        found, expected = self.bytes_of_output(), self.expected[method]
        differ = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        assert not differ, f"{method}: the output differs in {', '.join(differ)}"

    def attack(self, method: str, kills: int, *, at_accesses: bool) -> None:
        """Kill a merge this often, then let it end, and compare its output."""
        self.place.mkdir()
        runs, measured = self.runs[method], False
        for _ in range(kills):
            measured = self._kill(method, at_accesses) or measured
        code = runs.wait(runs.start())
        said = runs.said()
        if code == 3 and measured:
            assert "exists already" in said or "output exists" in said, said
            self.counts["had ended before"] += 1
        else:
            assert code == 0, f"the rerun ended with {code}: {said}"
            how = "only measured" if "merged already" in said else "went on or began again"
            self.counts[how] += 1
        self.require_expected(method)
        left = [path.name for path in self.place.iterdir() if path != self.out]
        assert not left, f"{method} left behind: {left}"
        shutil.rmtree(self.place)

    def _kill(self, method: str, at_accesses: bool) -> bool:
        """Kill a merge once. Returns whether the output is there, complete, without the record of a merge that has
        still to be measured."""
        runs = self.runs[method]
        number = signal.SIGKILL if at_accesses else self.random.choice(SIGNALS)
        kill_at = self.random.randrange(1, self.accesses[method] + 1) if at_accesses else 0
        pid = runs.start(kill_at=kill_at)
        if not at_accesses:
            time.sleep(self.random.random() * self.seconds[method])
            os.kill(pid, number)
        code = runs.wait(pid)
        self.counts[f"{method}: {signal.Signals(number).name}, exit {code}"] += 1
        self.killed += code not in (0, 3)  # those had ended before the kill
        if code != 3:  # an earlier kill came after the end
            runs.check_end(number, code)
        assert not list(runs.temporary.iterdir()), f"{method} left temporary files"
        if not self.out.exists():
            return False
        self.require_expected(method)
        return not self.out.with_name(f".{self.out.name}.merge.json").exists()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        harness = Harness(Path(folder), options.seed)
        for method in METHODS:
            seconds, accesses = harness.seconds[method], harness.accesses[method]
            print(f"an undisturbed {method}: {seconds:.1f} s, {accesses} write accesses", flush=True)
        number = 0
        while harness.killed < options.kills:
            method = METHODS[number // 2 % len(METHODS)]
            try:
                harness.attack(method, harness.random.randint(1, MOST_KILLS), at_accesses=bool(number % 2))
            except AssertionError:
                print(f"merge {number} by {method} (seed {options.seed}) lost something", file=sys.stderr)
                raise
            number += 1
            print(f"{harness.killed} kills of {number} merges: all ended in the same bytes", flush=True)
        print(f"{time.monotonic() - started:.0f} s")
        for what, count in sorted(harness.counts.items()):
            print(f"  {what}: {count}")


if __name__ == "__main__":
    main()
