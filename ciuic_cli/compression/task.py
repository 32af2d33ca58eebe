"""The task of a run: its checked inputs, that is the model, the options, the calibration text and the byte budget."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ciuic_cli._version import __version__
from ciuic_cli.allocation.arms import PassOptions
from ciuic_cli.allocation.matrices import weight_matrices
from ciuic_cli.allocation.reachable import check_reachable, largest_bytes
from ciuic_cli.artifact.writer import companions
from ciuic_cli.checkpoint.config.numbers import max_positions
from ciuic_cli.checkpoint.model_map import ModelMap, map_model
from ciuic_cli.checkpoint.mtp_parameters import keep_mtp
from ciuic_cli.checkpoint.reader import Checkpoint
from ciuic_cli.compression.options import CompressOptions
from ciuic_cli.compression.time_budget import within_time
from ciuic_cli.cost.forecast import Forecast, forecast, kept_noise, stored_codes_bytes, work_bytes
from ciuic_cli.cost.run_time import Rates, TextSize, measure_rates, phase_seconds
from ciuic_cli.errors import InputError
from ciuic_cli.evaluation.opening import open_generation_config
from ciuic_cli.hub.mirror import commit_of
from ciuic_cli.integers import ceil_div
from ciuic_cli.process.digests import sampled_digest
from ciuic_cli.process.file_faults import reading
from ciuic_cli.recovery.gradients import STEP_SEQUENCES
from ciuic_cli.report.readable import readable_bytes
from ciuic_cli.runtime.loading import choose_device
from ciuic_cli.text.calibration import CalibrationSequences, calibration_sequences
from ciuic_cli.text.shares import shares_of
from ciuic_cli.text.tokenizer import open_tokenizer

CHOICE = "chosen by time"
"""Key of the fingerprint: the time budget in seconds, and what it chose."""
HELD_OUT_EVERY = 24
"""One calibration sequence of so many is held out for measuring KL, where there are enough. Chosen, not tuned: four of
the 96 of `--effort default`."""


@dataclass(frozen=True)
class Task:
    """The inputs of a run. Created by `make_task`; every worker has an equal one.

    Attributes:
        map: the model's parameters and their roles.
        passes: what the passes (pruning, low-rank parts, bits) may choose from.
        text: the tokenized calibration text. `options.sequences` of its sequences, evenly spaced, are for the
            statistics and for measuring KL (held out). The others are for recovery.
        budget: bytes that the artifact's safetensors files may take.
        started: `time.monotonic()` at the beginning of the run.
        time_budget: seconds by which effort, sequences and states of `options` were chosen; None: the user gave them.
        rates: of this model on this machine, if they were measured for that.
    """

    checkpoint: Checkpoint
    map: ModelMap
    options: CompressOptions
    passes: PassOptions
    text: CalibrationSequences
    budget: int
    started: float
    time_budget: float | None = None
    rates: Rates | None = None

    @property
    def held_out(self) -> torch.Tensor:
        """LongTensor: the sequences for measuring KL, unseen by statistics and recovery unless there is only one."""
        sampled = self.text.tokens[self._sampled]
        return sampled[self._held_out(len(sampled))]

    @property
    def calibration(self) -> torch.Tensor:
        """LongTensor: the sequences for the statistics."""
        return self.text.tokens[self._in_statistics]

    @property
    def sequence_weights(self) -> torch.Tensor:
        """(sequences,) float32: what each sequence of `calibration` counts in the statistics."""
        return self.text.weights[self._in_statistics]

    @property
    def vocabulary_seen(self) -> float:
        """Share of the model's vocabulary that occurs in the sequences for the statistics."""
        return self.calibration.unique().numel() / self.map.config.get_text_config().vocab_size

    @property
    def recovery(self) -> torch.Tensor:
        """LongTensor: the sequences for all recovery steps.

        First come those that the statistics have not seen, then those of the statistics, both in random order. They
        are repeated until there are enough for all steps.
        """
        unseen = torch.ones(len(self.text.tokens), dtype=torch.bool)
        unseen[self._sampled] = False
        random = torch.Generator().manual_seed(self.options.seed)
        parts = [
            part[torch.randperm(len(part), generator=random)]
            for part in (self.text.tokens[unseen], self.calibration)
        ]
        needed, once = STEP_SEQUENCES * self.options.level.recovery_steps, torch.cat(parts)
        return once.repeat(ceil_div(needed, len(once)), 1)[:needed]

    @property
    def _sampled(self) -> torch.Tensor:
        """LongTensor: indices of the sequences for the statistics and of the held-out ones."""
        return self.text.sample(min(self.options.sequences, len(self.text.tokens)))

    @property
    def _in_statistics(self) -> torch.Tensor:
        """LongTensor: indices of the sequences for the statistics."""
        sampled = self._sampled
        return sampled if len(sampled) == 1 else sampled[~self._held_out(len(sampled))]

    def _held_out(self, count: int) -> torch.Tensor:
        return _held_out(count, self.options.level.least_held_out)

    def settled_options(self) -> dict[str, Any]:
        """The options that decide the artifact's bytes. Defaults that depend on the model are filled in."""
        seqlen = self.options.sequence_length(max_positions(self.map.config))
        return self.options.as_dict(ratio=2 * self.map.stored_numel / self.budget, seqlen=seqlen)

    @property
    def codes_bytes(self) -> int:
        """The most bytes that codes take on the disk at a time: while a file is written, twice its own."""
        return stored_codes_bytes(self.budget, recovers=self.options.level.recovery_steps > 0)

    def forecast(self) -> Forecast:
        """Expected time, memory and disk space of the run."""
        return forecast(
            self.map, self._size, **_work(self.options), ranks=self.options.rank != "off", budget=self.budget,
            device=choose_device(self.options.device), started=self.started, rates=self.rates,
        )  # fmt: skip

    def work_bytes(self) -> int:
        """The most bytes that a phase of the run is expected to take in memory, see `forecast.work_bytes`."""
        return work_bytes(
            self.map, weight_matrices(self.map.parameters.values()), self._size,
            device=choose_device(self.options.device), tall_outputs=self.options.level.tall_outputs,
        )  # fmt: skip

    def fingerprint(self) -> dict[str, Any]:
        """Everything that must be equal for an interrupted run to continue: version, options, text, source files.

        Not the device: a run may continue on another one. `CHOICE` has what `--time-budget` chose, which a run that
        continues takes (`make_task`).
        """
        folder = self.checkpoint.folder.resolve()
        config = json.dumps(self.checkpoint.config, sort_keys=True, default=str).encode()
        chosen = {} if self.time_budget is None else {CHOICE: self._choice()}
        return {
            **chosen,
            "version": __version__,
            "options": {name: value for name, value in self.settled_options().items() if name != "device"},
            "budget": self.budget,
            "calibration": hashlib.sha256(self.text.tokens.numpy().tobytes()).hexdigest(),
            "config": hashlib.sha256(config).hexdigest(),
            "weights": {
                os.path.relpath(path, folder): self._file_states[path] for path in self.checkpoint.files()
            },
        }

    @property
    def _size(self) -> TextSize:
        return _text_size(self.options, len(self.calibration), len(self.held_out), self.text.tokens.shape[1])

    def _choice(self) -> dict[str, Any]:
        names = ("effort", "nsamples", "states")
        return {"time_budget": self.time_budget, **{name: getattr(self.options, name) for name in names}}

    def choice_sentence(self) -> str:
        """What `--time-budget` chose."""
        chosen = self.options
        return (
            f"--time-budget chose --effort {chosen.effort} with {chosen.sequences} calibration sequences and "
            f"{chosen.mean_states:,} trellis states per weight"
        )

    def overrun_sentence(self, seconds: float) -> str | None:
        """A remark for the user if a run of so many seconds took longer than `--time-budget` allows; else None."""
        if self.time_budget is None or seconds <= self.time_budget:
            return None
        return (
            f"the run took {seconds:.0f} s, more than the {self.time_budget:g} s of --time-budget: the forecast was "
            "too low, or the machine had other work"
        )

    @cached_property
    def _file_states(self) -> dict[Path, list[Any] | None]:
        """The state of every source file and every file copied into the artifact, at the first call."""
        copied = companions(self.checkpoint.folder).values()
        return {path: _file_state(path) for path in (*self.checkpoint.files(), *copied)}

    def require_unchanged(self) -> None:
        """Raise InputError if a source file was changed or removed since the run began."""
        for path, state in self._file_states.items():
            if _file_state(path) != state:
                raise InputError(
                    "the file changed during the run",
                    file=path,
                    remedy="do not change the checkpoint while it is compressed; start again",
                )


def make_task(
    checkpoint: Checkpoint,
    options: CompressOptions,
    hint: Callable[[str], None],
    unfinished: Mapping[str, Any] | None = None,
    started: float | None = None,
) -> Task:
    """Map the model, compute the budget and tokenize the calibration text; reads no weights.

    hint: called with warnings about the checkpoint. unfinished: the fingerprint of a run to continue, whose choice of
    effort, sequences and states is taken if it had the same time budget. started: `time.monotonic()` at the beginning
    of the run, if it began before this call.

    Raises:
        UsageError: more tokens per sequence than the model has positions; a rank that no matrix has room for.
        InputError: a checkpoint, tokenizer or text that cannot be used.
        TargetError: a budget below the smallest possible artifact; a time budget below the shortest run.
    """
    started = time.monotonic() if started is None else started
    model_map = map_model(checkpoint)
    for warning in model_map.warnings:
        hint(warning)
    if options.mtp == "keep":
        model_map = keep_mtp(model_map)
        if not model_map.mtp.kept:
            hint("the checkpoint has no multi-token-prediction layers to keep")
    seqlen = options.sequence_length(max_positions(model_map.config))
    options, time_budget, rates = _settled(options, model_map, seqlen, unfinished or {}, started)
    passes = PassOptions(options.bits, options.L, options.prune, options.rank)
    budget = options.budget(2 * model_map.stored_numel)
    check_reachable(model_map, budget, passes)
    largest = largest_bytes(model_map, passes)
    if budget > largest:
        hint(
            f"the artifact will have {readable_bytes(largest)}, less than you asked for: all weights get the most bits "
            "that --bits allows"
        )
    budget = min(budget, largest)
    open_generation_config(checkpoint.folder)  # copied into the artifact; raises if it is damaged
    sequences = options.sequences + STEP_SEQUENCES * options.level.recovery_steps
    text = calibration_sequences(
        open_tokenizer(checkpoint.folder),
        options.calibration,
        only=options.calibration_only,
        nsamples=sequences,
        seqlen=seqlen,
        vocab_size=model_map.config.get_text_config().vocab_size,
        passages=options.level.passages,
    )
    if short := _short_text(options, text, sequences):
        hint(short)
    return Task(checkpoint, model_map, options, passes, text, budget, started, time_budget, rates)


def _short_text(options: CompressOptions, text: CalibrationSequences, sequences: int) -> str | None:
    """A remark for the user if `--calibration` has text for fewer sequences than the run asks for; else None."""
    wanted = sequences if options.calibration_only else shares_of(sequences, sequences, sequences)[1]
    if not options.calibration or text.own >= wanted:
        return None
    rest = (
        "the run has no others, and more text would help"
        if options.calibration_only
        else "the package's mix fills up, unless you give more text or --calibration-only"
    )
    all_of_them = f"{wanted} sequences of {text.tokens.shape[1]} tokens"
    if options.level.recovery_steps:
        all_of_them += ", those for recovery included"
    return f"--calibration has text for {text.own} of {all_of_them}: {rest}"


def _settled(
    options: CompressOptions,
    model_map: ModelMap,
    seqlen: int,
    unfinished: Mapping[str, Any],
    started: float,
) -> tuple[CompressOptions, float | None, Rates | None]:
    """The options with what the time budget chooses, or chose for the unfinished run; that budget; measured rates."""
    seconds = options.time_budget
    if seconds is None:
        return options, None, None
    earlier = unfinished.get(CHOICE)
    if earlier is not None and earlier["time_budget"] == seconds:
        return replace(options, **{**earlier, "time_budget": None}), seconds, None
    matrices = weight_matrices(model_map.parameters.values())
    device = choose_device(options.device)
    rates = measure_rates(model_map, matrices, ranks=options.rank != "off", device=device)
    start = time.monotonic() - started

    def seconds_of(choice: CompressOptions) -> float:
        held_out = int(_held_out(choice.sequences, choice.level.least_held_out).sum())
        text = _text_size(choice, choice.sequences - held_out, held_out, seqlen)
        room = kept_noise(model_map, matrices, text, tall_outputs=choice.level.tall_outputs)
        return start + sum(phase_seconds(model_map, rates, text, kept_noise=room, **_work(choice)).values())

    return within_time(options, seconds_of), seconds, rates


def _work(options: CompressOptions) -> dict[str, Any]:
    """Arguments of `forecast` and `phase_seconds`: the work besides the text."""
    level = options.level
    return {
        "states": options.mean_states, "probed_layers": level.probed_layers, "tall_outputs": level.tall_outputs,
    }  # fmt: skip


def _text_size(options: CompressOptions, sequences: int, held_out: int, length: int) -> TextSize:
    level = options.level
    return TextSize(
        sequences, held_out, length, STEP_SEQUENCES * level.recovery_steps, level.probe_tokens, level.gradient_every
    )  # fmt: skip


def _file_state(path: Path) -> list[Any] | None:
    """Size, modification time and sampled digest of a file, to detect a change; None if the file does not exist.

    The commit stands for a file on the hub of which only parts are on disk.
    """
    if (commit := commit_of(path)) is not None:
        return [path.stat().st_size, 0, commit]
    with reading(path), suppress(FileNotFoundError):
        status = path.stat()
        return [status.st_size, status.st_mtime_ns, sampled_digest(path)]
    return None


def _held_out(count: int, least: int) -> torch.Tensor:
    """Mask (count,) of the held-out sequences, evenly spaced: at least one.

    Every 24th is held out (HELD_OUT_EVERY), of short texts one of fewer, until there are `least`; but of six and more
    no more than every third.
    """
    every = count if count < 2 * least else min(HELD_OUT_EVERY, max(3, count // least))
    return torch.arange(count) % every == every - 1
