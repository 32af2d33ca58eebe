"""The sequences of a run whose user gives a calibration text, and what the report says about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import compress_tiny

from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.compression import run
from ciuic_cli.compression.options import CompressOptions
from ciuic_cli.compression.task import make_task
from ciuic_cli.report.losses import read_losses
from ciuic_cli.report.sentences import vocabulary_sentence
from ciuic_cli.text.shares import MIX_WEIGHT


def test_the_mix_adds_half_as_many_sequences(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path
) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("llama"))
    given = {"calibration": (text,), "nsamples": 8, "seqlen": 48, "effort": "fast"}
    hints: list[str] = []
    task = make_task(checkpoint, CompressOptions(**given), hints.append)
    alone = make_task(checkpoint, CompressOptions(**given, calibration_only=True), hints.append)
    assert not hints
    assert len(task.text.tokens) == 12 and task.text.own == 8
    assert torch.equal(task.text.tokens[-8:], alone.text.tokens)
    assert len(task.calibration) == 10 and torch.equal(task.held_out, task.text.tokens[5::6])
    assert task.sequence_weights.tolist() == pytest.approx(4 * [MIX_WEIGHT] + 6 * [1.0])
    assert alone.sequence_weights.tolist() == len(alone.calibration) * [1.0]
    assert alone.vocabulary_seen < task.vocabulary_seen < 1
    assert alone.vocabulary_seen == len(set(alone.calibration.flatten().tolist())) / 263
    assert task.fingerprint() != alone.fingerprint()


@pytest.mark.parametrize(
    ("only", "said"),
    [
        (False, "the package's mix fills up, unless you give more text or --calibration-only"),
        (True, "the run has no others, and more text would help"),
    ],
)
def test_a_short_text_is_not_filled_up_in_silence(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, only: bool, said: str
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("a b c d e f g h i j k l m n o p q r s t u v w x y z " * 5)
    hints: list[str] = []
    options = CompressOptions(
        calibration=(short,), nsamples=8, seqlen=48, effort="fast", calibration_only=only
    )
    task = make_task(open_checkpoint(tiny_checkpoint("llama")), options, hints.append)
    assert task.text.own == 5
    assert [hint for hint in hints if "--calibration" in hint] == [
        f"--calibration has text for 5 of 8 sequences of 48 tokens: {said}"
    ]
    hints.clear()
    make_task(open_checkpoint(tiny_checkpoint("llama")), replace(options, effort="best"), hints.append)
    (hint,) = (hint for hint in hints if "--calibration" in hint)
    assert f" sequences of 48 tokens, those for recovery included: {said}" in hint


def test_the_statistics_know_what_each_sequence_counts(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[torch.Tensor] = []

    def stop(*args: Any, weights: torch.Tensor, **options: Any) -> None:
        given.append(weights)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "collect_statistics", stop)
    with pytest.raises(KeyboardInterrupt):
        compress_tiny(tiny_checkpoint("llama"), tmp_path / "out", text, nsamples=8, calibration_only=False)
    assert given[0].tolist() == pytest.approx(4 * [MIX_WEIGHT] + 6 * [1.0])


def test_the_report_says_which_share_of_the_vocabulary_was_seen(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path
) -> None:
    report = compress_tiny(tiny_checkpoint("llama_tied"), tmp_path / "out", text)
    seen = report.statistics.vocabulary_seen
    assert seen is not None and 10 / 263 < seen < 60 / 263
    assert read_losses(tmp_path / "out").vocabulary_seen == seen
    assert f"{100 * seen:.3g} %" in vocabulary_sentence(seen)
    assert f"{100 * seen:.3g} %" in (tmp_path / "out" / "memory_report.html").read_text()
