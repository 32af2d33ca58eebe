"""`merge`: makes one model of an artifact and an adapter, and measures what that costs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ciuic_cli.artifact import publishing, writer
from ciuic_cli.artifact.reader import Artifact, open_artifact
from ciuic_cli.checkpoint.folder import locate
from ciuic_cli.compression.journal import Journal
from ciuic_cli.compression.pipeline import compress
from ciuic_cli.errors import UsageError
from ciuic_cli.evaluation.divergence import kl_divergence
from ciuic_cli.evaluation.logits import logits_in_parts
from ciuic_cli.export.dense import export_dense
from ciuic_cli.layerwise.logits import logit_tokens
from ciuic_cli.process.atomic_files import remove_path, write_atomically
from ciuic_cli.process.progress import Progress, no_progress
from ciuic_cli.runtime.loading import choose_device, load
from ciuic_cli.text.documents import DOCUMENT_SEPARATOR, builtin_calibration_text
from ciuic_cli.text.tokenizer import open_tokenizer
from ciuic_cli.train.examples import Example
from ciuic_cli.train.merging.adapter import ADAPTER_FILE, adapted_model, require_adapter, require_moderate
from ciuic_cli.train.merging.changes import Changes, changes_of
from ciuic_cli.train.merging.low_rank_parts import write_low_rank
from ciuic_cli.train.merging.merged_checkpoint import merged_checkpoint, merged_rows, require_fitting
from ciuic_cli.train.merging.unmeasured import Unmeasured

METHODS = ("requantize", "low-rank", "bf16")
"""How an adapter is merged: weights coded again in the artifact's bytes; the codes kept and the adapter added as
low-rank parts; or a dense bfloat16 model."""
HELD_OUT_EVERY = 8
"""Every 8th training example is held out of the statistics, for measuring KL (chosen)."""
MOST_EXAMPLES = 16
"""Most examples on which KL is measured (chosen)."""


@dataclass(frozen=True)
class MergeReport:
    """What merging did.

    Attributes:
        bytes_before, bytes_after: of the safetensors files of the artifact and of the merged model.
        kl_base: KL(adapter's model || artifact without the adapter), nats per token: what the adapter does.
        kl_merged: KL(adapter's model || merged model), nats per token: what merging loses.
        tokens: tokens on which both were measured.
    """

    method: str
    bytes_before: int
    bytes_after: int
    kl_base: float
    kl_merged: float
    tokens: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def merge(
    model: str | Path,
    adapter: Path,
    out: Path,
    method: str,
    examples: Sequence[Example],
    *,
    nsamples: int | None = None,
    device: str = "auto",
    progress: Progress = no_progress,
    hint: Callable[[str], None] = lambda message: None,
) -> MergeReport:
    """Merge the adapter in the folder `adapter` into the artifact `model`, and write the result to `out`.

    "requantize" continues after a crash, as `compress` does. After all methods, a command that was killed while it
    measured KL measures it when it is repeated.

    Args:
        examples: training text. The statistics of "requantize" come from it, and from the package's calibration text if
            it is short; KL is measured on every 8th example, which the statistics do not see.
        nsamples: calibration sequences of "requantize"; default: those of the effort level.

    Raises:
        InputError: model, adapter or output cannot be used.
        UsageError: the adapter cannot be merged this way.
        TargetError: the merged model cannot be coded in the artifact's bytes.
    """
    if method not in METHODS:
        raise UsageError(f"--method {method} is unknown", remedy=f"use one of {', '.join(METHODS)}")
    out = Path(os.path.abspath(out))
    folder = locate(model)
    artifact = open_artifact(folder)
    require_adapter(adapter)
    unmeasured = Unmeasured(out, method, folder, adapter)
    if unmeasured.is_left():
        hint(f"{out} is merged already; only its KL is missing")
        _tidy_up_after(out)
    else:
        # The output of `ciuic train --merge` is OUT/merged, inside the adapter's folder.
        is_inside = adapter.resolve() in Path(os.path.realpath(out)).parents
        publishing.require_new(out, folder, *(() if is_inside else (adapter,)))
        unmeasured.begin()
        try:
            _write(artifact, adapter, out, method, examples, nsamples, device, progress, hint)
        except BaseException:
            if not unmeasured.is_left():
                unmeasured.end()
            raise
    adapted = adapted_model(folder, adapter, device)  # again, so that it takes no memory in between
    held_out = list(examples[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]) or list(examples[-1:])
    report = _measured(adapted, artifact, out, method, held_out[:MOST_EXAMPLES], device)
    unmeasured.end()
    return report


def _tidy_up_after(out: Path) -> None:
    """Remove the working folders of a merge that was killed after its output had got its name."""
    publishing.discard(out)
    remove_path(_texts_of(out))
    journal = Journal(out)
    journal.sweep()
    if journal.folder.is_dir():
        with journal:
            journal.remove()


def _write(
    artifact: Artifact,
    adapter: Path,
    out: Path,
    method: str,
    examples: Sequence[Example],
    nsamples: int | None,
    device: str,
    progress: Progress,
    hint: Callable[[str], None],
) -> None:
    """Write and publish the merged model."""
    remove_path(_texts_of(out))  # of a killed merge by another method
    changes = changes_of(adapted_model(artifact.folder, adapter, device))
    require_moderate(changes, adapter)
    if method == "requantize":
        seen = [example for number, example in enumerate(examples, 1) if number % HELD_OUT_EVERY]
        _requantize(artifact, adapter, changes, out, seen or list(examples), nsamples, device, progress, hint)
    elif method == "low-rank":
        _write_low_rank(artifact, changes, out, progress)
    else:
        require_fitting(artifact, changes)
        written = export_dense(
            artifact.folder, out, rows=lambda opened: partial(merged_rows, opened, changes), progress=progress
        )
        for warning in written.warnings:
            hint(warning)


def _requantize(
    artifact: Artifact,
    adapter: Path,
    changes: Changes,
    out: Path,
    seen: Sequence[Example],
    nsamples: int | None,
    device: str,
    progress: Progress,
    hint: Callable[[str], None],
) -> None:
    """Compress the merged weights into the artifact's bytes, with its trellis."""
    source = merged_checkpoint(artifact.folder, changes, (adapter / ADAPTER_FILE,))
    tokenizer = open_tokenizer(artifact.folder)
    own = f"\n{DOCUMENT_SEPARATOR}\n".join(tokenizer.decode(example.ids) for example in seen)
    texts = _texts_of(out)
    texts.mkdir(exist_ok=True)
    try:
        files = [texts / f"text-{number}.txt" for number in range(2)]
        for file, text in zip(files, (own, builtin_calibration_text()), strict=True):
            write_atomically(file, text.encode())
        compress(
            source, out, target_size=artifact.file_bytes, calibration=files, effort=_effort(artifact),
            nsamples=nsamples, mtp="keep" if artifact.mtp.kept else "drop", device=device, progress=progress, hint=hint,
        )  # fmt: skip
    finally:
        remove_path(texts)


def _texts_of(out: Path) -> Path:
    """The folder beside the output for the texts of "requantize". A killed merge leaves it; the next one ends it."""
    return out.with_name(f".{out.name}.merge-texts")


def _effort(artifact: Artifact) -> str:
    """The effort level whose trellis the artifact has."""
    longest = 0
    for blob in artifact.blobs.values():
        with blob.matrices() as matrices:
            longest = max(longest, *(matrix.header.L for matrix in matrices))
    return "fast" if longest <= 12 else "default"


def _write_low_rank(artifact: Artifact, changes: Changes, out: Path, progress: Progress) -> None:
    try:
        folder = publishing.begin(out)
        write_low_rank(artifact.folder, changes, folder, progress)
        writer.write_checksums(folder)
        publishing.publish(out, force=False)
    except BaseException:
        publishing.discard(out)
        raise


def _measured(
    adapted: Any, artifact: Artifact, out: Path, method: str, examples: Sequence[Example], device: str
) -> MergeReport:
    if method == "bf16":
        from transformers import AutoModelForCausalLM

        dense: Any = AutoModelForCausalLM.from_pretrained(out, dtype="auto", trust_remote_code=False)
        merged: Any = dense.to(choose_device(device)).eval()
    else:
        merged = load(out, device)
    base = adapted.get_base_model()
    config = artifact.folder / "config.json"
    kl_merged = kl_base = 0.0
    tokens = 0
    for example in examples:
        ids = torch.tensor(example.ids)
        kl_merged += _kl(_logits(base, ids, config), _logits(merged, ids, config))
        with adapted.disable_adapter():
            without = _logits(base, ids, config)
        kl_base += _kl(_logits(base, ids, config), without)
        tokens += len(ids)
    after = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    return MergeReport(method, artifact.file_bytes, after, kl_base / tokens, kl_merged / tokens, tokens)


@torch.inference_mode()
def _logits(model: Any, ids: torch.Tensor, config: Path) -> list[torch.Tensor]:
    size = logit_tokens(model.config.get_text_config().vocab_size)
    return list(logits_in_parts(model, ids, len(ids), size, config))


def _kl(logits: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """The sum over tokens of KL(model || other model), in nats, from their logits in parts."""
    return sum(
        float(kl_divergence(p.float().log_softmax(-1), q.float().log_softmax(-1)).sum())
        for p, q in zip(logits, others, strict=True)
    )
