"""Recovery: gradients against the whole model's, evaluations and resuming, stored factors, text of the steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from threaded_workers import Meeting, Threads
from torch import nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from ciuic_cli.allocation.matrices import weight_matrices
from ciuic_cli.checkpoint.model_map import ModelMap, map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.codecs.bits import stored_bits
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.scales import encode_scales
from ciuic_cli.codecs.trellis import decode_dense
from ciuic_cli.compression import options, pipeline
from ciuic_cli.compression.task import Task
from ciuic_cli.layerwise import logits as layer_logits
from ciuic_cli.layerwise.linear_hooks import Key
from ciuic_cli.passes.rounding import round_without_feedback
from ciuic_cli.process.progress import no_progress
from ciuic_cli.process.threads import threads
from ciuic_cli.process.workers import Workers
from ciuic_cli.recovery import gradients, tuning
from ciuic_cli.recovery.gradients import STEP_SEQUENCES
from ciuic_cli.recovery.row_factors import Factors, tunable_shapes, with_row_factors
from ciuic_cli.recovery.schedule import FULL_RATE_KL, PEAK_LEARNING_RATE, WARM_UP_STEPS, learning_rate
from ciuic_cli.recovery.tuning import EVALUATIONS, Recovery, RecoveryResult
from ciuic_cli.report.json_form import to_plain
from ciuic_cli.report.schema import MemoryReport, RecoveryPass
from ciuic_cli.text.calibration import CalibrationSequences

CPU = torch.device("cpu")
BITS = 3


@pytest.fixture(autouse=True)
def _in_float32_and_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of 20 tokens go through the head in three parts; the references take them whole."""
    monkeypatch.setattr(gradients, "compute_dtype", lambda device: torch.float32)
    monkeypatch.setattr(layer_logits, "LEAST_TOKENS", 1)
    monkeypatch.setattr(layer_logits, "LOGIT_BYTES", 8 * 4 * 256)


class Rounded:
    """A model whose matrices are all rounded to `BITS`."""

    def __init__(self, folder: Path) -> None:
        self.map: ModelMap = map_model(open_checkpoint(folder))
        self.matrices: dict[Key, PackedMatrix] = {}
        for matrix in weight_matrices(self.map.parameters.values()):
            name, expert = matrix.name, matrix.expert
            weight = self.map.read(name) if expert is None else self.map.read_expert(name, expert)
            self.matrices[name, expert] = round_without_feedback(weight.float(), BITS, L=12)

    def coded(self, name: str, expert: int | None) -> PackedMatrix | None:
        return self.matrices.get((name, expert))

    def recovery(self, text: torch.Tensor, folder: Path, **options: Any) -> Recovery:
        def adjust(prefix: str, layer: nn.Module) -> AbstractContextManager[None]:
            return nullcontext()

        settings: dict[str, Any] = {"device": CPU, "workers": Workers(), **options}
        return Recovery(self.map, self.coded, adjust, text, folder, **settings)


def _text(steps: int, length: int = 20) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 250, (STEP_SEQUENCES * steps, length), generator=generator)


def _measures(values: list[float]) -> Callable[[Factors], float]:
    left: Iterator[float] = iter(values)
    return lambda factors: next(left)


def _loss_and_gradients(
    rounded: Rounded, folder: Path, text: torch.Tensor, at: Factors
) -> tuple[float, dict[Key, torch.Tensor]]:
    """KL of the rounded model with these factors, and the factors' gradients by autograd through the whole model."""
    original = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    factors = {key: factor.clone().requires_grad_(True) for key, factor in at.items()}
    weights: dict[str, torch.Tensor] = {}
    for name, value in original.named_parameters():
        experts = range(len(value)) if value.dim() == 3 else [None]
        parts = []
        for expert in experts:
            packed, factor = rounded.coded(name, expert), factors.get((name, expert))
            if packed is None:
                part = value.detach() if expert is None else value.detach()[expert]
                parts.append(part if factor is None else part * factor)
            else:
                part = decode_dense(packed)
                if factor is not None:
                    part = part * factor.detach()[:, None]
                if expert is not None:  # the stream has stacks in the model's own dtype
                    part = part.to(rounded.map.dtype).float()
                parts.append(part if factor is None else part * (factor / factor.detach())[:, None])
        weights[name] = torch.stack(parts) if value.dim() == 3 else parts[0]
    if original.config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    with torch.no_grad():
        p = original(input_ids=text).logits.log_softmax(-1)
    q = functional_call(original, weights, kwargs={"input_ids": text}).logits.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    (2 * (kl + gradients.KL_FLOOR).sqrt()).mean().backward()
    return float(kl.detach().mean()), {
        key: factor.grad for key, factor in factors.items() if factor.grad is not None
    }


def _random_factors(rounded: Rounded) -> dict[Key, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = tunable_shapes(rounded.map, rounded.coded)
    return {key: 1 + 0.2 * torch.rand(shape, generator=generator) for key, shape in shapes.items()}


@pytest.mark.parametrize(
    "family", ["llama", "llama_tied", "qwen2", "deepseek_v2", "deepseek_v3", "deepseek_v4", "mixtral"]
)
def test_gradients_are_those_of_the_whole_model(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """For rows (without biases), experts and norms; the streams run one sequence after the other."""
    folder, text = tiny_checkpoint(family), _text(1)
    rounded = Rounded(folder)
    factors = _random_factors(rounded)
    _, expected = _loss_and_gradients(rounded, folder, text, factors)
    tuned = rounded.recovery(text, tmp_path)
    for key, factor in factors.items():
        tuned._factors[key].data.copy_(factor)
    found: dict[Key, torch.Tensor] = {}

    def note_gradients(*args: Any, **kwargs: Any) -> None:
        found.update({key: value.grad for key, value in tuned._factors.items() if value.grad is not None})

    monkeypatch.setattr(tuned._optimizer, "step", note_gradients)
    tuned.tune(lambda factors: 1.0, lambda state: None, no_progress)
    assert found.keys() == expected.keys() and any(len(value) > 1 for value in found.values())
    for key, gradient in expected.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(found[key], gradient, rtol=1e-3, atol=1e-3 * scale + 1e-9, msg=str(key))
    left = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert not left, "files of a finished step"


@pytest.mark.parametrize(("dtype", "steps", "most"), [(torch.float32, 40, 0.85), (torch.bfloat16, 16, 0.95)])
def test_kl_falls_on_the_text_of_the_steps(
    dtype: torch.dtype,
    steps: int,
    most: float,
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the same sequences in each step this is plain descent, which must lower KL clearly."""
    monkeypatch.setattr(gradients, "compute_dtype", lambda device: dtype)
    folder = tiny_checkpoint("deepseek_v3")
    rounded, same = Rounded(folder), _text(1)
    tuned = rounded.recovery(same.repeat(steps, 1), tmp_path)
    result = tuned.tune(_measures([5, 4, 3, 2, 1]), lambda state: None, no_progress)
    assert result.steps == steps
    assert any(rounded.coded(*key) is None for key in result.factors), "no norm was tuned"
    ones = {key: torch.ones_like(factor) for key, factor in result.factors.items()}
    before, _ = _loss_and_gradients(rounded, folder, same, ones)
    after, _ = _loss_and_gradients(rounded, folder, same, result.factors)
    assert after < most * before


def test_no_step_is_made_with_gradients_that_are_not_finite(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "root_kl_gradient", lambda logits, p: torch.full_like(logits, torch.nan))
    tuned = Rounded(tiny_checkpoint("llama_tied")).recovery(_text(2), tmp_path)
    result = tuned.tune(_measures([1.0]), lambda state: None, no_progress)
    assert (result.factors, result.steps, result.kl_after) == ({}, 0, 1.0)


def test_with_nothing_to_tune_there_are_no_steps(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "tunable_shapes", lambda model_map, coded: {})
    tuned = Rounded(tiny_checkpoint("llama_tied")).recovery(_text(2), tmp_path)
    assert tuned.tune(_measures([1.0]), lambda state: None, no_progress).steps == 0


@pytest.mark.parametrize(
    ("values", "steps", "kept"),
    [
        ([1.0, 0.9, 0.8, 0.7, 0.6], 8, True),
        ([1.0, 1.1, 1.2], 4, False),
        ([1.0, 0.9, 0.95, 0.97], 6, True),
        ([1.0, 1.1, 1.0, 1.1, 1.05], 8, False),
    ],
)
def test_it_stops_after_two_rises_and_returns_the_best_factors(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, values: list[float], steps: int, kept: bool
) -> None:
    rounded = Rounded(tiny_checkpoint("llama_tied"))
    seen: list[Factors] = []
    measure = _measures(values)

    def note(factors: Factors) -> float:
        seen.append(factors)
        return measure(factors)

    result = rounded.recovery(_text(2 * EVALUATIONS), tmp_path).tune(note, lambda state: None, no_progress)
    assert len(seen) == len(values)
    assert (result.steps, result.kl_before, result.kl_after) == (steps, values[0], min(values))
    assert bool(result.factors) == kept
    best = seen[values.index(min(values))]
    assert all(torch.equal(result.factors[key], best[key]) for key in best)


def test_a_saved_state_leads_to_the_same_factors(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    rounded, text = Rounded(tiny_checkpoint("deepseek_v3")), _text(EVALUATIONS)
    states: list[bytes] = []

    def keep(state: Callable[[], bytes]) -> None:
        states.append(state())

    whole = rounded.recovery(text, tmp_path / "a").tune(_measures([5, 4, 3, 2, 1]), keep, no_progress)
    assert len(states) == EVALUATIONS
    again = rounded.recovery(text, tmp_path / "b", state=states[1]).tune(_measures([2, 1]), keep, no_progress)
    done = rounded.recovery(text, tmp_path / "c", state=states[EVALUATIONS - 1]).tune(
        _measures([]), keep, no_progress
    )
    for other in (again, done):
        assert other.factors.keys() == whole.factors.keys() and replace(other, factors={}) == replace(
            whole, factors={}
        )
        assert all(torch.equal(other.factors[key], whole.factors[key]) for key in whole.factors)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_any_number_of_workers_gives_the_same_factors(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, size: int
) -> None:
    """Five workers are more than a step has sequences."""
    rounded, text, meeting = Rounded(tiny_checkpoint("deepseek_v3")), _text(2), Meeting(size)

    def work(rank: int, workers: Workers) -> RecoveryResult:
        tuned = rounded.recovery(text, tmp_path / str(workers.size) / str(rank), workers=workers)
        return tuned.tune(_measures([3, 2, 1]), lambda state: None, no_progress)

    alone = work(0, Workers())
    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(lambda rank: work(rank, Threads(rank, size, meeting)), range(size)))
    for result in results:
        assert result.factors.keys() == alone.factors.keys() and result.steps == 2
        assert all(torch.equal(result.factors[key], alone.factors[key]) for key in alone.factors)


def test_any_number_of_threads_gives_the_same_gradients(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Gradients are compared because factors hide most of their last bits."""
    rounded, found = Rounded(tiny_checkpoint("deepseek_v3")), []
    for number in (1, 2, 3, 5):
        with threads(number):
            gradients = rounded.recovery(_text(1), tmp_path / str(number))._gradients
            gradients.prepare(no_progress)
            gradients.accumulate(0)
        found.append({key: factor.grad for key, factor in gradients.factors.items()})
    for other in found[1:]:
        assert all(torch.equal(gradient, other[key]) for key, gradient in found[0].items())


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [learning_rate(step, 60, 0.2) for step in range(60)]
    assert rates.index(max(rates)) == WARM_UP_STEPS - 1
    assert rates[0] < 0.25 * PEAK_LEARNING_RATE and rates[-1] < 0.01 * PEAK_LEARNING_RATE


def test_the_peak_rate_falls_with_the_root_of_the_kl() -> None:
    rates = [learning_rate(9, 60, kl) for kl in (1.0, FULL_RATE_KL, FULL_RATE_KL / 4, -1e-9)]
    assert rates == pytest.approx([rates[0], rates[0], rates[0] / 2, 0.0])


@pytest.mark.parametrize("is_sorted", [False, True])
def test_rows_are_multiplied_within_half_a_step(is_sorted: bool) -> None:
    draw = np.random.default_rng(0)
    weight = torch.randn(70, 64, generator=torch.Generator().manual_seed(0))
    packed = round_without_feedback(weight, 4, L=12)
    if is_sorted:
        classes = draw.integers(0, 16, 70).astype(np.uint8)
        packed = replace(packed, header=replace(packed.header, row_class=classes))
    factors = torch.from_numpy(draw.uniform(0.97, 1.03, 70)).float()
    found = with_row_factors(packed, factors)
    assert found.nbytes == packed.nbytes and found.header.scale_steps > 100
    ratio = decode_dense(found).norm(dim=1) / decode_dense(packed).norm(dim=1)
    assert float((ratio / factors).log2().abs().max()) <= 0.51 / found.header.scale_steps


def test_rows_without_codes_do_not_make_steps_coarser() -> None:
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    weight[:16] *= 1e-4
    whole = round_without_feedback(weight, 4, L=12)
    base, codes = encode_scales(whole.header.scales[:48])
    row_bits = stored_bits([0, 4, 4])
    header = replace(whole.header, base=base, row_scale=codes, row_bits=row_bits)
    packed = PackedMatrix(header, whole.codes[len(whole.codes) // 3 :])
    found = with_row_factors(packed, torch.full((48,), 1.01))
    assert found.header.scale_steps > 100
    ratio = decode_dense(found)[16:].norm(dim=1) / decode_dense(packed)[16:].norm(dim=1)
    assert float((ratio / 1.01).log2().abs().max()) <= 0.51 / found.header.scale_steps


def test_matrices_that_cannot_have_factors_are_left_out(tiny_checkpoint: Callable[..., Path]) -> None:
    rounded = Rounded(tiny_checkpoint("llama_tied"))
    shapes = tunable_shapes(rounded.map, rounded.coded)
    key = ("model.layers.0.mlp.up_proj.weight", None)
    assert key in shapes and not any("embed" in name for name, _ in shapes)
    weight = decode_dense(rounded.matrices[key])
    weight[3] *= 1e-4
    rounded.matrices[key] = round_without_feedback(weight, 4, L=12)
    assert shapes.keys() - tunable_shapes(rounded.map, rounded.coded).keys() == {key}
    other = ("model.layers.1.mlp.up_proj.weight", None)
    part = (
        round_without_feedback(weight[:16], 4, L=12),
        round_without_feedback(torch.randn(16, len(weight)), 4, L=12),
    )
    rounded.matrices[other] = replace(rounded.matrices[other], lowrank=part)
    assert shapes.keys() - tunable_shapes(rounded.map, rounded.coded).keys() == {key, other}


TEXT = "The quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs. "


@pytest.fixture
def best(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., MemoryReport]:
    """compress() with effort best, short sequences, and a few recovery steps."""
    monkeypatch.setitem(options.EFFORTS, "best", options.Effort(1 << 12, 6, 16, EVALUATIONS))
    words = TEXT.split()
    random = np.random.default_rng(0)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(random.choice(words, 3000)))

    def run(source: Path, out: Path, **more: Any) -> MemoryReport:
        settings = {
            "effort": "best",
            "seqlen": 48,
            "calibration": [text],
            "calibration_only": True,
            "ratio": 3.0,
            **more,
        }
        return pipeline.compress(source, out, **settings)

    return run


def _weights(out: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(out.glob("*.safetensors")))


@pytest.mark.parametrize("family", ["llama_tied", "deepseek_v3"])
def test_best_reports_its_gain_and_a_killed_run_ends_in_the_same_bytes(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, best: Callable[..., MemoryReport], family: str
) -> None:
    source, out = tiny_checkpoint(family), tmp_path / "out"
    report = best(source, tmp_path / "whole")
    (entry,) = [entry for entry in report.passes if isinstance(entry, RecoveryPass)]
    assert entry.kl_after <= entry.kl_before
    # The loaded artifact rounds activations otherwise than the model that runs layer by layer, and a difference in the
    # last bits can route a token to another expert.
    tolerance = 0.1 if family == "deepseek_v3" else 2e-3
    assert report.measured_kl == pytest.approx(entry.kl_after, rel=tolerance)
    assert report.artifact_bytes <= report.budget_bytes
    tuned = [row for row in report.components if "tuned" in (row.dense or "")]
    assert len(tuned) == entry.norms and bool(tuned) == (entry.kl_after < entry.kl_before)

    def interrupt(what: str, done: int, total: int) -> None:
        if what == "recovery" and done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        best(source, out, progress=interrupt)
    steps: list[int] = []
    best(source, out, progress=lambda what, done, total: steps.append(done) if what == "recovery" else None)
    assert steps and steps[0] > 1, "it started again from the first step"
    assert _weights(out) == _weights(tmp_path / "whole")
    passes = json.loads((out / "memory_report.json").read_text())["passes"]
    assert [to_plain(entry)] == [other for other in passes if other["name"] == "recovery"]


def _task(monkeypatch: pytest.MonkeyPatch, sequences: int, nsamples: int, steps: int) -> Task:
    """A task with numbered sequences and an effort level with this many calibration sequences and recovery steps."""
    monkeypatch.setitem(options.EFFORTS, "best", options.Effort(1 << 12, nsamples, 16, steps))
    settings = options.CompressOptions(effort="best")
    batches = torch.arange(sequences)[:, None].expand(-1, 3)
    return Task(None, None, settings, None, CalibrationSequences(batches, 0), 0, 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sequences", "nsamples", "steps"), [(368, 128, 60), (200, 128, 60), (40, 128, 60), (17, 5, 2)]
)
def test_held_out_sequences_are_not_tuned_on(
    monkeypatch: pytest.MonkeyPatch, sequences: int, nsamples: int, steps: int
) -> None:
    task = _task(monkeypatch, sequences, nsamples, steps)
    held_out, seen = set(task.held_out[:, 0].tolist()), set(task.calibration[:, 0].tolist())
    tuned = task.recovery[:, 0].tolist()
    fresh = set(range(sequences)) - held_out - seen
    assert len(tuned) == STEP_SEQUENCES * steps and held_out.isdisjoint(tuned) and held_out.isdisjoint(seen)
    assert len(held_out | seen) == min(nsamples, sequences)
    first = tuned[: len(fresh)]
    assert set(first) <= fresh and len(set(first)) == len(first), (
        "sequences that the statistics have not seen come first"
    )
    if len(tuned) >= sequences:
        assert set(tuned) == fresh | seen
    assert task.recovery.equal(_task(monkeypatch, sequences, nsamples, steps).recovery)
    assert tuned != sorted(tuned)


@pytest.mark.parametrize(("nsamples", "held_out"), [(7, 1), (12, 4), (64, 4), (96, 4), (128, 5)])
def test_few_sequences_are_held_out_and_none_recovers_without_steps(
    monkeypatch: pytest.MonkeyPatch, nsamples: int, held_out: int
) -> None:
    task = _task(monkeypatch, nsamples, nsamples, 0)
    assert len(task.held_out) == held_out
    assert len(task.calibration) == nsamples - held_out and len(task.recovery) == 0
