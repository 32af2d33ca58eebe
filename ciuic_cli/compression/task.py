"""What is asked of a run: options, text and byte budget, checked before any work is done."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch

from ciuic_cli._version import __version__
from ciuic_cli.allocation.arms import PassOptions
from ciuic_cli.artifact import writer
from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.checkpoint.reader import Checkpoint
from ciuic_cli.checkpoint.reading import reading
from ciuic_cli.compression.journal import Journal
from ciuic_cli.compression.options import Options
from ciuic_cli.cost.forecast import Forecast, Text, forecast
from ciuic_cli.errors import InputError
from ciuic_cli.process import atomic_files
from ciuic_cli.process.digests import sampled_digest
from ciuic_cli.recovery.tuning import SEQUENCES
from ciuic_cli.runtime.loading import choose_device

HELD_OUT_EVERY = 16
"""One calibration sequence in so many is kept from the statistics, to measure KL on."""


@dataclass(frozen=True)
class Task:
    """A run that can be done: the model, what decides its bytes, and the text.

    batches: LongTensor (sequences, length): `nsamples` for statistics and held-out text, evenly spread, and between
    them what is left for recovery. budget: bytes that the artifact's safetensors files may take.
    """

    checkpoint: Checkpoint
    map: ModelMap
    options: Options
    passes: PassOptions
    batches: torch.Tensor
    budget: int

    @property
    def held_out(self) -> torch.Tensor:
        """The sequences that neither statistics nor recovery see, unless there is only one."""
        sampled = self.batches[self._sampled]
        return sampled[_held_out(len(sampled))]

    @property
    def calibration(self) -> torch.Tensor:
        """The sequences of the statistics."""
        sampled = self.batches[self._sampled]
        return sampled if len(sampled) == 1 else sampled[~_held_out(len(sampled))]

    @property
    def recovery(self) -> torch.Tensor:
        """The sequences of recovery's steps: first what the statistics have not seen, in random order, then what they
        have, as often as it takes."""
        fresh = torch.ones(len(self.batches), dtype=torch.bool)
        fresh[self._sampled] = False
        random = torch.Generator().manual_seed(self.options.seed)
        parts = [
            part[torch.randperm(len(part), generator=random)]
            for part in (self.batches[fresh], self.calibration)
        ]
        wanted, rounds = SEQUENCES * self.options.recovery_steps, torch.cat(parts)
        return rounds.repeat(-(-wanted // len(rounds)), 1)[:wanted]

    @property
    def _sampled(self) -> torch.Tensor:
        """Which sequences are for the statistics, and held out of them."""
        count = min(self.options.nsamples, len(self.batches))
        return torch.arange(count) * len(self.batches) // count

    def forecast(self) -> Forecast:
        recovery = SEQUENCES * self.options.recovery_steps
        text = Text(len(self.calibration), len(self.held_out), self.batches.shape[1], recovery)
        return forecast(
            self.map, text, L=self.options.L, ranks=self.options.rank != "off", budget=self.budget,
            device=choose_device(self.options.device),
        )  # fmt: skip

    def fingerprint(self) -> dict[str, Any]:
        """What must be equal for a run to go on: program, options, text, and the source files."""
        folder = self.checkpoint.folder.resolve()
        config = json.dumps(self.checkpoint.config, sort_keys=True, default=str).encode()
        return {
            "version": __version__,
            "options": self.options.as_dict(),
            "budget": self.budget,
            "calibration": hashlib.sha256(self.batches.numpy().tobytes()).hexdigest(),
            "config": hashlib.sha256(config).hexdigest(),
            "weights": {os.path.relpath(path, folder): self._marks[path] for path in self.checkpoint.files()},
        }

    @cached_property
    def _marks(self) -> dict[Path, list[Any] | None]:
        """The source files, and those that go with the artifact, as they were when they were first asked for."""
        companions = writer.companions(self.checkpoint.folder).values()
        return {path: _mark(path) for path in (*self.checkpoint.files(), *companions)}

    def require_unchanged(self) -> None:
        """Raise InputError if a file of the source is another one than when the run began, or gone."""
        for path, mark in self._marks.items():
            if _mark(path) != mark:
                raise InputError(
                    "the file changed during the run",
                    file=path,
                    remedy="leave the checkpoint alone while it is compressed, and start again",
                )


def _mark(path: Path) -> list[Any] | None:
    """What tells a source file from another of its name: size, time, and samples of its bytes; None: it is gone."""
    with reading(path), suppress(FileNotFoundError):
        status = path.stat()
        return [status.st_size, status.st_mtime_ns, sampled_digest(path)]
    return None


def _held_out(count: int) -> torch.Tensor:
    """Mask (count,) of the sequences that the statistics do not see."""
    every = min(HELD_OUT_EVERY, count)
    return torch.arange(count) % every == every - 1


def check_apart(out: Path, checkpoint: Checkpoint, calibration: Sequence[str | Path]) -> None:
    """Refuse an output that is the input, lies in it, or holds a file that the run reads."""
    source = checkpoint.folder.resolve()
    if out == source or source in out.parents:
        raise InputError("the output is the input", file=out, remedy="choose another output folder")
    companions = writer.companions(checkpoint.folder).values()
    for path in (source, *checkpoint.files(), *companions, *calibration):
        if out in Path(os.path.realpath(path)).parents:
            raise InputError(
                "the input lies inside the output", file=path, remedy="choose another output folder"
            )


def check_output(out: Path, *, force: bool) -> None:
    """Refuse an output that exists (with `force`: that is no folder), or cannot be written, before any work."""
    place = _existing_parent(out)
    for mounted in _mount_points(out):
        raise InputError(
            "a file system is mounted there", file=mounted, remedy="choose a folder inside of it"
        )
    if os.path.lexists(out) and not out.is_dir():
        raise InputError("the output is a file", file=out, remedy="choose a folder")
    if out.exists() and not force and not Journal(out).published():
        raise InputError(
            "the output exists already",
            file=out,
            remedy="choose another folder, or replace it with --force (in Python: force=True)",
        )
    for folder in (out, place):
        if folder.exists() and not atomic_files.is_writable(folder):
            raise InputError(
                "the output's folder is read-only", file=folder, remedy="choose a folder you can write to"
            )
    if out.exists() and not atomic_files.may_rename(out):
        raise InputError(
            "the output belongs to another user, and only its owner may replace it (sticky folder)",
            file=out,
            remedy="choose another output folder",
        )


def _mount_points(folder: Path) -> list[Path]:
    """`folder` and what is in it, as far as other file systems are mounted there: no renaming moves those."""
    mounted = [Path(part.mountpoint) for part in psutil.disk_partitions(all=True)]
    return [place for place in mounted if place.is_relative_to(folder)]


def _existing_parent(out: Path) -> Path:
    """The folder that exists and below which all is to be made; refuses a path that cannot be."""
    try:
        str(out).encode()
    except UnicodeEncodeError as error:
        raise InputError("the output's path is not UTF-8", file=out, remedy="choose another name") from error
    if any(os.path.islink(part) for part in (out, *out.parents)):  # `out` is a real path otherwise
        raise InputError(
            "the output's path is a circle of symbolic links", file=out, remedy="choose another output folder"
        )
    missing = [part for part in out.parents if not os.path.exists(part)]
    place = out.parents[len(missing)]
    if not place.is_dir():
        raise InputError(
            "the output lies below a file, not a folder", file=place, remedy="choose another output folder"
        )
    limit = os.pathconf(place, "PC_NAME_MAX")
    if any(len(os.fsencode(part.name)) > limit for part in (Journal(out).ended, *missing)):
        raise InputError(
            f"the output's name is too long: with the endings of the work folders it passes {limit} bytes",
            file=out,
            remedy="choose a shorter name",
        )
    return place


def budget_of(
    original: int, *, ratio: float = 1.0, target_bpw: float | None = None, target_size: int | None = None
) -> int:
    """Bytes that the artifact's safetensors files may take; the target as `check_target` has it."""
    if target_size is not None:
        return target_size
    if target_bpw is not None:
        return int(original * target_bpw / 16)
    return int(original / ratio)
