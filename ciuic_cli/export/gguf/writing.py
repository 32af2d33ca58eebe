"""`ciuic export --to gguf`: a dense checkpoint as a GGUF file of a given size for an unmodified llama.cpp.

llama.cpp's converter writes the checkpoint in bfloat16, and its quantizer rounds. What ciuic adds is the plan: the
importance of columns, and a type for each tensor, so that the predicted KL is least for the bytes.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ciuic_cli.allocation.knapsack import allocate
from ciuic_cli.artifact.schema import is_artifact
from ciuic_cli.checkpoint.config.numbers import max_positions
from ciuic_cli.checkpoint.folder import locate, read_config
from ciuic_cli.checkpoint.model_map import ModelMap, map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.compression.options import CompressOptions
from ciuic_cli.errors import EnvironmentFault, InputError, TargetError, UsageError
from ciuic_cli.export.gguf.feedback import round_again
from ciuic_cli.export.gguf.importance import write_importance
from ciuic_cli.export.gguf.llama_cpp import LlamaCpp, find_llama_cpp
from ciuic_cli.export.gguf.pricing import price_types
from ciuic_cli.export.gguf.tensors import GgufFile, match_tensors
from ciuic_cli.export.gguf.types import DEFAULT_TARGET_BITS, GgufType
from ciuic_cli.process.atomic_files import require_space, sync_file
from ciuic_cli.process.file_faults import environment_fault
from ciuic_cli.process.progress import Progress, no_progress
from ciuic_cli.report.model_card import original_of
from ciuic_cli.runtime.loading import choose_device
from ciuic_cli.statistics.collect import collect_statistics
from ciuic_cli.text.calibration import CalibrationSequences, calibration_sequences
from ciuic_cli.text.tokenizer import open_tokenizer

_BYTES_PER_WEIGHT = 8
"""Bytes per weight of the temporary files: bfloat16, float32 and a quantized file, with a margin."""


@dataclass(frozen=True)
class GgufOptions:
    """How to make a GGUF file.

    Attributes:
        target_bits: bits of the whole file per weight.
        calibration, calibration_only, nsamples, seqlen, seed, device: as in `CompressOptions`.
        llama_cpp: llama.cpp's folder; None: its programs are on PATH.

    Raises:
        UsageError: a value that the option cannot have.
    """

    target_bits: float = DEFAULT_TARGET_BITS
    calibration: tuple[Path, ...] = ()
    calibration_only: bool = False
    nsamples: int | None = None
    seqlen: int | None = None
    seed: int = 0
    device: str = "auto"
    llama_cpp: Path | None = None
    text: CompressOptions = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.target_bits, (int, float)) or not 0 < self.target_bits <= 16:
            raise UsageError(
                f"--target-bits is {self.target_bits}, not above 0 and at most 16",
                remedy="give 4.5, for example",
            )
        text = CompressOptions(
            calibration=self.calibration, calibration_only=self.calibration_only, nsamples=self.nsamples,
            seqlen=self.seqlen, seed=self.seed, device=self.device,
        )  # fmt: skip
        object.__setattr__(self, "text", text)


@dataclass(frozen=True)
class ExportedGguf:
    """What `export_gguf` wrote.

    Attributes:
        file_bytes: of the file. weights: all numbers of the model. bits: of the file per weight.
        predicted_kl: of the rounding, in nats per token.
        types: by GGUF name of a tensor, the name of its type.
        shares: by type, its share of the weights.
        unplanned: names of the model's matrices that the file holds in another form; they have 8 bits.
    """

    file_bytes: int
    weights: int
    bits: float
    predicted_kl: float
    types: dict[str, str]
    shares: dict[str, float]
    unplanned: tuple[str, ...]


def export_gguf(
    model: str | Path,
    destination: str | Path,
    options: GgufOptions | None = None,
    *,
    progress: Progress = no_progress,
    hint: Callable[[str], None] = lambda message: None,
) -> ExportedGguf:
    """Write a dense checkpoint as a GGUF file with the least predicted KL for its bytes.

    Args:
        model: folder or hub id of the original checkpoint.
        destination: the file; it must not exist. It appears when it is complete. About 8 bytes per weight of temporary
            files lie beside it during the run.
        progress: called as progress(phase, done, total).
        hint: called with remarks for the user.

    Raises:
        InputError: an artifact, or a checkpoint that cannot be read or converted; the file exists.
        TargetError: the smallest types take more than the target.
        EnvironmentFault: a program of llama.cpp or the package gguf is missing, a program fails, or the disk is full.
    """
    settings = options or GgufOptions()
    folder, out = locate(model), Path(os.path.realpath(destination))
    _require_dense(folder, destination)
    if os.path.lexists(out):
        raise InputError("the output exists already", file=out, remedy="choose another name, or remove it")
    programs = find_llama_cpp(settings.llama_cpp)
    device = choose_device(settings.device)
    model_map = map_model(open_checkpoint(folder))
    for warning in model_map.warnings:
        hint(warning)
    text = calibration_text(model_map, settings)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        require_space(out, _BYTES_PER_WEIGHT * model_map.stored_numel)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as work:
            planner = GgufPlanner(
                model_map, text, Path(work), programs, device=device, seed=settings.seed,
                gradient_every=settings.text.level.gradient_every, progress=progress,
            )  # fmt: skip
            if planner.unmatched:
                hint(
                    f"llama.cpp stores {len(planner.unmatched)} matrices in another form ({planner.unmatched[0].key}): "
                    "they get 8 bits and no importance"
                )
            return planner.write(out, settings.target_bits)
    except OSError as error:
        raise environment_fault(error, out) from error


class GgufPlanner:
    """The priced tensors of one checkpoint, from which files of any size can be written.

    The constructor converts the checkpoint, collects statistics and prices all types.

    Args:
        text: for the statistics, all of its sequences. gradient_every: as in `collect_statistics`.
        without: names of types that are not used.
        work: an empty folder; its files are needed as long as the object is.

    Attributes:
        tensors: those that get a type. unmatched: the model's matrices that the file holds in another form.
        source: the converted file. importance: the file for llama-quantize.
    """

    def __init__(
        self,
        model_map: ModelMap,
        text: CalibrationSequences,
        work: Path,
        programs: LlamaCpp,
        *,
        device: torch.device,
        seed: int = 0,
        gradient_every: int = 1,
        without: Collection[str] = (),
        progress: Progress = no_progress,
    ) -> None:
        known = programs.help
        converted, statistics_folder = work / "converted.gguf", work / "statistics"
        programs.convert(model_map.checkpoint.folder, converted)
        self.folder, self.work, self.programs = model_map.checkpoint.folder, work, programs
        self.source = GgufFile(converted)
        self.tensors, self.unmatched = match_tensors(model_map, self.source, known, without)
        statistics_folder.mkdir()
        self.statistics = statistics = collect_statistics(
            model_map, text.tokens, statistics_folder,
            device=device, seed=seed, weights=text.weights, gradient_every=gradient_every, progress=progress,
        )  # fmt: skip
        self.importance = work / "importance.gguf"
        write_importance(self.importance, self.tensors, statistics, *text.tokens.shape)
        self.loss, self.nbytes, self.rest = price_types(
            self.tensors, self.source, statistics, programs, self.importance, work, progress
        )

    def write(self, out: Path, target_bits: float) -> ExportedGguf:
        """Write the file with the least predicted KL of at most `target_bits` per weight.

        Raises:
            TargetError: the smallest types take more.
            EnvironmentFault: llama-quantize fails.
        """
        weights = self.source.weights
        budget = int(target_bits * weights / 8)
        least = self.rest + int(self.nbytes[:, 0].sum())
        if least > budget:
            raise TargetError(
                f"{target_bits:g} bits per weight are {budget:,} bytes; the smallest file has {least:,}",
                file=self.folder,
                remedy=f"--target-bits {math.ceil(800 * least / weights) / 100}: rows that are no multiple of 256 have "
                "no smaller types, and the vocabulary counts",
            )
        allocation = allocate(self.loss, self.nbytes, budget - self.rest)
        types = [tensor.types[choice] for tensor, choice in zip(self.tensors, allocation.choice, strict=True)]
        chosen = {tensor.name: kind for tensor, kind in zip(self.tensors, types, strict=True)}
        part, shares = self.work / "output.gguf", Counter[GgufType]()
        for tensor, kind in zip(self.tensors, types, strict=True):
            shares[kind] += tensor.weights
        main_type = shares.most_common(1)[0][0]
        self.programs.quantize(
            self.source.path, part, chosen, self.importance, self.work, main_type.file_type
        )
        round_again(part, self.tensors, types, self.source, self.statistics)
        expected, written = self.rest + allocation.nbytes, part.stat().st_size
        if written != expected:
            raise EnvironmentFault(
                f"llama-quantize wrote {written:,} bytes where the plan has {expected:,}: it did not follow the types",
                file=self.programs.quantizer,
                remedy="use a newer llama.cpp",
            )
        sync_file(part)
        part.replace(out)
        return ExportedGguf(
            written, weights, 8 * written / weights, allocation.loss,
            {name: kind.name for name, kind in chosen.items()},
            {kind.name: count / weights for kind, count in shares.most_common()},
            tuple(matrix.key for matrix in self.unmatched),
        )  # fmt: skip


def _require_dense(folder: Path, destination: str | Path) -> None:
    """Raise InputError for an artifact; the message has the command with its original."""
    if not is_artifact(read_config(folder)):
        return
    original = original_of(folder)
    raise InputError(
        "this is an artifact, whose rounded weights would be rounded a second time",
        file=folder,
        remedy="give the original checkpoint that it was made of, because the plan for GGUF is made from its weights: "
        f"ciuic export {original or 'ORIGINAL'} {destination} --to gguf",
    )


def calibration_text(model_map: ModelMap, settings: GgufOptions) -> CalibrationSequences:
    """The calibration sequences of an export."""
    text = settings.text
    return calibration_sequences(
        open_tokenizer(model_map.checkpoint.folder),
        text.calibration,
        only=text.calibration_only,
        nsamples=text.sequences,
        seqlen=text.sequence_length(max_positions(model_map.config)),
        vocab_size=model_map.config.get_text_config().vocab_size,
    )
