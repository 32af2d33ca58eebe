"""Changes single bytes of artifacts and checks the consequences: `python corrupting.py --count 1000`.

Two artifacts are made: the sample model with experts in one file, and a tiny llama with low-rank parts in several
files with an index. Every case changes one random byte of one file; then

- `ciuic inspect --verify` must find it: exit code 3 and a message that names the file;
- the artifact is loaded as `ciuic eval --prompt` loads it, and continues a text by a few tokens: it is refused with
  exit code 3, or it works, with whatever numbers. With the native library under the sanitizers (`make corruptions`)
  this shows that no changed byte leads a kernel outside its memory.

Both run in forks of one process that has imported everything. Anything else is a finding: another exit code, a signal,
a traceback, a sanitizer report, more than LIMIT seconds, or MEMORY bytes more than the undamaged artifact needs.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from ciuic_cli.allocation import artifact_size
from ciuic_cli.artifact.layout import lay_out
from ciuic_cli.artifact.reader import open_artifact
from ciuic_cli.artifact.verification import verify
from ciuic_cli.artifact.writer import CHECKSUMS
from ciuic_cli.checkpoint.shards import INDEX_NAME
from ciuic_cli.cli import app as cli
from ciuic_cli.cli.console import Console
from ciuic_cli.cli.exit_codes import run
from ciuic_cli.codecs import native
from ciuic_cli.evaluation.perplexity import generate_text

TESTS = Path(__file__).parents[2]
sys.path.insert(0, str(TESTS))  # for the checkpoints that all tests share
SAMPLE = TESTS.parent / "samples" / "deepseek-v3-tiny"

OPTIONS = ("--effort", "fast", "--nsamples", "4", "--seqlen", "64", "--device", "cpu")
LOW_RANK = ("--ratio", "2", "--rank", "16")
SHARD_BYTES = 20_000
"""Largest file of the llama's artifact; chosen so that it has several."""
PROMPT = "The river"
LIMIT = 300
"""Seconds per command; chosen far above the usual second."""
MEMORY = 1 << 30
"""Bytes of resident memory that a damaged artifact may take beyond the undamaged one. Chosen, not tuned."""
BLOB_HEAD = 96
"""Bytes at the start of a blob that are mostly structure: its header, bit widths and scales."""


@dataclass(frozen=True)
class Done:
    """How a forked command ended: exit code (negative: a signal), output, and peak resident memory in bytes."""

    code: int
    stdout: str
    stderr: str
    peak: int

    def field(self, label: str) -> str:
        lines = [line.strip() for line in self.stderr.splitlines()]
        return next((line[len(label) + 2 :] for line in lines if line.startswith(f"{label}: ")), "")

    @property
    def clean(self) -> bool:
        """Exit 0 without an error message, or exit 3 with exactly one that names file and remedy; no sign of a bug."""
        bugs = ("Traceback", "AddressSanitizer", "runtime error:")
        refusals = int(self.code == 3)
        return (
            self.code in (0, 3)
            and not any(word in self.stderr for word in bugs)
            and self.stderr.count("error: ") == refusals
            and bool(self.field("file") and self.field("try")) == bool(refusals)
        )


@dataclass
class Target:
    """An artifact to damage. text, peak: what it generates undamaged, and the memory in bytes that this takes."""

    folder: Path
    files: list[Path] = field(init=False)
    structure: dict[Path, list[range]] = field(init=False)
    """By weight file: the byte ranges of its header and of the first BLOB_HEAD bytes of each blob."""
    text: str = ""
    peak: int = 0

    def __post_init__(self) -> None:
        found = verify(self.folder)
        assert not found.problems and not found.unlisted, "every file of an artifact must have a checksum"
        self.files = sorted(path for path in self.folder.iterdir() if path.stat().st_size)
        assert len(self.files) == found.files + 1, "every file except the checksums has a checksum"
        opened = open_artifact(self.folder)
        self.structure = {}
        for blob in opened.blobs.values():
            begin = min(entry.begin for entry in opened.tensors.values() if entry.file == blob.entry.file)
            places = self.structure.setdefault(blob.entry.file, [range(begin)])
            places.append(range(blob.entry.begin, min(blob.entry.end, blob.entry.begin + BLOB_HEAD)))

    def byte(self, generator: random.Random) -> tuple[Path, int, str]:
        """A random byte: its file, its offset, and its kind for the table.

        Half of the files are drawn by size, half uniformly, and half of the bytes in weights are in the structure:
        otherwise small files and headers would hardly ever be hit.
        """
        sizes = [path.stat().st_size for path in self.files]
        (file,) = generator.choices(self.files, sizes if generator.randrange(2) else None)
        if file not in self.structure:
            return file, generator.randrange(file.stat().st_size), file.name
        header, *blobs = self.structure[file]
        part = generator.randrange(4)
        if part == 0:
            return file, generator.choice(header), "weights: header"
        if part == 1:
            return file, generator.choice(generator.choice(blobs)), "weights: start of a blob"
        return (
            file,
            generator.randrange(len(header), file.stat().st_size),
            "weights: anywhere behind the header",
        )


@dataclass
class Harness:
    """Both artifacts, and counts of (kind of byte, outcome)."""

    place: Path
    seed: int = 0
    tiny: bool = False
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    peak: int = 0
    """Largest excess of memory over the undamaged artifact, bytes."""

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        self.random = random.Random(self.seed)
        from tiny_checkpoints import make_checkpoint

        disable_progress_bar()
        self.place.joinpath("temporary").mkdir()
        text = self.place / "text.txt"
        text.write_text("the quick brown fox jumps over the lazy dog by the river; " * 60)
        llama = make_checkpoint("llama", self.place / "llama")
        experts = make_checkpoint("deepseek_v3", self.place / "experts") if self.tiny else SAMPLE
        self.targets = []
        for source, options, shard_bytes in ((experts, (), 1 << 30), (llama, LOW_RANK, SHARD_BYTES)):
            out = self.place / f"artifact-{len(self.targets)}"
            arguments = (
                "compress",
                source,
                out,
                "--calibration",
                text,
                "--calibration-only",
                *OPTIONS,
                *options,
            )
            made = self.forked(functools.partial(self.command, *arguments, shard_bytes=shard_bytes))
            assert made.code == 0, made.stderr
            target = Target(out)
            assert (shard_bytes == SHARD_BYTES) == (len(target.structure) > 1) == (out / INDEX_NAME).exists()
            with open(os.devnull, "w") as ignored, redirect_stdout(ignored), redirect_stderr(ignored):
                # The forks inherit what these commands import, and then take a fifth of the time.
                assert self.use(out) == self.command("inspect", out, "--verify") == 0
            undamaged = [self.forked(functools.partial(self.use, out)) for _ in range(2)]
            assert all(done.code == 0 for done in undamaged), undamaged
            assert undamaged[0].stdout == undamaged[1].stdout, "the same weights must generate the same text"
            target.text, target.peak = undamaged[0].stdout, undamaged[1].peak
            self.targets.append(target)

    # --- commands that run in a fork

    @staticmethod
    def command(*arguments: object, shard_bytes: int | None = None) -> int:
        """Run the command line; returns its exit code. shard_bytes: largest size of a file of the output."""
        if shard_bytes is not None:
            artifact_size.lay_out = functools.partial(lay_out, shard_bytes=shard_bytes)  # type: ignore[assignment]
        sys.argv = ["ciuic", *map(str, arguments)]
        try:
            cli.main()
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 98
        return 0

    @staticmethod
    def use(folder: Path) -> int:
        """Load the artifact and generate text; errors are reported as by a command."""
        return run(Console(), lambda: print(generate_text(folder, PROMPT, device="cpu", max_new_tokens=4)))

    def forked(self, action: Callable[[], int]) -> Done:
        """Run `action` in a fork; its return value becomes the exit code."""
        said = [self.place / "stdout", self.place / "stderr"]
        pid = os.fork()
        if not pid:
            code = 99
            try:
                signal.alarm(LIMIT)  # SIGALRM ends the process even inside native code
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                tempfile.tempdir = str(self.place / "temporary")
                for number, file in enumerate(said, start=1):
                    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
                code = action()
                sys.stdout.flush()
            finally:
                sys.stderr.flush()
                os._exit(code)
        _, status, used = os.wait4(pid, 0)
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in said]
        return Done(os.waitstatus_to_exitcode(status), *texts, peak=used.ru_maxrss << 10)

    # --- one case

    def attack(self, number: int) -> None:
        """Change a byte, verify, load and generate; then restore the byte."""
        target = self.targets[number % len(self.targets)]
        file, place, kind = target.byte(self.random)
        good = file.read_bytes()
        other = self.random.choice([value for value in range(256) if value != good[place]])
        what = f"case {number}: {target.folder.name}/{file.name}, byte {place}: {good[place]} became {other}"
        file.write_bytes(good[:place] + bytes([other]) + good[place + 1 :])
        try:
            found = self.forked(functools.partial(self.command, "inspect", target.folder, "--verify"))
            # If the checksums themselves are damaged, the error may name the file of the damaged entry.
            named = file.name == CHECKSUMS or found.field("file").endswith(f"/{file.name}")
            if found.code != 3 or not found.clean or not named:
                self.findings.append(f"{what}: --verify ended with {found.code}: {found.stderr[-2000:]}")
            used = self.forked(functools.partial(self.use, target.folder))
        finally:
            file.write_bytes(good)
        self.peak = max(self.peak, used.peak - target.peak)
        if not used.clean or used.peak > target.peak + MEMORY:
            self.findings.append(
                f"{what}: use ended with {used.code}, {used.peak >> 20} MB: {used.stderr[-2000:]}"
            )
        elif used.code == 3:
            self.counts[kind, "refused"] += 1
        else:
            self.counts[kind, "same text" if used.stdout == target.text else "other text"] += 1

    def table(self) -> str:
        """The counts as a table: kinds of bytes by outcomes."""
        outcomes = ("refused", "other text", "same text")
        kinds = sorted({kind for kind, _ in self.counts})
        rows = [[kind, *(self.counts[kind, outcome] for outcome in outcomes)] for kind in kinds]
        rows.append(["all", *(sum(self.counts[kind, outcome] for kind in kinds) for outcome in outcomes)])
        lines = [["the changed byte", *outcomes], *rows]
        return "\n".join(
            "  ".join([f"{line[0]!s:<36}", *(f"{cell!s:>10}" for cell in line[1:])]) for line in lines
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--tiny", action="store_true", help="random experts instead of the sample model's: quicker"
    )
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    print(f"native library: {native.interface()._name}", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="corruptions-") as folder:
        harness = Harness(Path(folder), options.seed, options.tiny)
        for number in range(options.count):
            harness.attack(number)
    print(
        f"{options.count} changed bytes in {time.monotonic() - started:.0f} s, seed {options.seed}: "
        f"{options.count - len(harness.findings)} found by --verify and refused or read when loaded, "
        f"{len(harness.findings)} findings; at most {harness.peak >> 20} MB more memory than undamaged"
    )
    print(harness.table())
    for finding in harness.findings:
        print(finding, file=sys.stderr)
    return 1 if harness.findings else 0


if __name__ == "__main__":
    sys.exit(main())
