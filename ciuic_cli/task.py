"""What is asked of a run: options, text and byte budget, checked before any work is done."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ciuic_cli import __version__
from ciuic_cli.artifact import writer
from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.checkpoint.reader import Checkpoint
from ciuic_cli.errors import InputError
from ciuic_cli.forecast import Forecast, Text, forecast
from ciuic_cli.journal import Journal
from ciuic_cli.planning import PassOptions
from ciuic_cli.runtime.loading import choose_device


@dataclass(frozen=True)
class Effort:
    """What an effort level spends: trellis window L, calibration sequences and their length."""

    window: int
    nsamples: int
    seqlen: int


HELD_OUT_EVERY = 16
"""One calibration sequence in so many is kept from the statistics, to measure KL on."""
EFFORTS = {"fast": Effort(12, 24, 512), "default": Effort(16, 64, 512), "best": Effort(16, 128, 512)}


@dataclass(frozen=True)
class Options:
    """Everything besides the weights and the text that decides the artifact's bytes."""

    ratio: float
    effort: str
    window: int
    nsamples: int
    seqlen: int
    seed: int
    prune: str | float
    rank: str | int
    bits: tuple[int, ...]
    mtp: str
    device: str

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "bits": list(self.bits)}


@dataclass(frozen=True)
class Task:
    """A run that can be done: the model, what decides its bytes, and the text.

    batches: LongTensor (sequences, length). budget: bytes that the artifact's safetensors files may take.
    """

    checkpoint: Checkpoint
    map: ModelMap
    options: Options
    passes: PassOptions
    batches: torch.Tensor
    budget: int

    @property
    def held_out(self) -> torch.Tensor:
        """The sequences that the statistics do not see."""
        return self.batches[_held_out(len(self.batches))]

    @property
    def calibration(self) -> torch.Tensor:
        """The sequences that they do."""
        single = len(self.batches) == 1
        return self.batches if single else self.batches[~_held_out(len(self.batches))]

    def forecast(self) -> Forecast:
        text = Text(len(self.calibration), len(self.held_out), self.batches.shape[1])
        return forecast(
            self.map, text, window=self.options.window, ranks=self.options.rank != "off", budget=self.budget,
            device=choose_device(self.options.device),
        )  # fmt: skip

    def fingerprint(self) -> dict[str, Any]:
        """What must be equal for a run to go on: program, options, text, and the source files."""
        files = {}
        for path in self.checkpoint.files():
            status = path.stat()
            files[os.path.relpath(path, self.checkpoint.folder.resolve())] = [
                status.st_size,
                status.st_mtime_ns,
            ]
        config = json.dumps(self.checkpoint.config, sort_keys=True, default=str).encode()
        return {
            "version": __version__,
            "options": self.options.as_dict(),
            "budget": self.budget,
            "calibration": hashlib.sha256(self.batches.numpy().tobytes()).hexdigest(),
            "config": hashlib.sha256(config).hexdigest(),
            "weights": files,
        }


def _held_out(count: int) -> torch.Tensor:
    """Mask (count,) of the sequences that the statistics do not see."""
    every = min(HELD_OUT_EVERY, count)
    return torch.arange(count) % every == every - 1


def check_output(out: Path, checkpoint: Checkpoint, *, force: bool, dry_run: bool) -> None:
    """Refuse an output that exists, is the input, or cannot be written, before any work."""
    source = checkpoint.folder.resolve()
    if out == source or source in out.parents:
        raise InputError("the output is the input", file=out, remedy="choose another output folder")
    if out in source.parents:
        raise InputError("the input lies inside the output", file=out, remedy="choose another output folder")
    if dry_run:
        return
    if out.exists() and not out.is_dir():
        raise InputError("the output is a file", file=out, remedy="choose a folder")
    if out.exists() and not force and not Journal(out).published():
        raise InputError(
            "the output exists already",
            file=out,
            remedy="choose another folder, or replace it with --force (in Python: force=True)",
        )
    for place in (out, next(path for path in out.parents if path.exists())):
        if place.exists() and not writer.is_writable(place):
            raise InputError(
                "the output's folder is read-only", file=place, remedy="choose a folder you can write to"
            )


def budget_of(original: int, ratio: float, target_bpw: float | None, target_size: int | None) -> int:
    """Bytes that the artifact's safetensors files may take."""
    if target_size is not None:
        return target_size
    if target_bpw is not None:
        return int(original * target_bpw / 16)
    return int(original / ratio)
