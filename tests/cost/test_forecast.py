"""The forecast against measured bytes, and its dependence on the model's size."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from second_device import DEVICE, SecondDevice

from ciuic_cli.allocation.machine import Machine, processor
from ciuic_cli.allocation.matrices import EMBEDDING_ROLES, WeightMatrix, weight_matrices
from ciuic_cli.checkpoint.model_map import ModelMap, map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.compression.pipeline import compress
from ciuic_cli.cost import forecast as module
from ciuic_cli.cost import run_time, timing
from ciuic_cli.cost.forecast import (
    disk_bytes,
    forecast,
    stored_moment_bytes,
    stored_vocabulary_bytes,
    work_bytes,
)
from ciuic_cli.cost.run_time import TextSize
from ciuic_cli.kernels import fronts
from ciuic_cli.statistics import experts
from ciuic_cli.statistics.collect import collect_statistics

WIDE = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128}


def _map(folder: Path) -> ModelMap:
    return map_model(open_checkpoint(folder))


@pytest.mark.parametrize("limit", [1 << 27, 1000])
def test_the_statistics_take_the_forecast_bytes(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(experts, "FULL_MOMENTS_BYTES", limit)
    model_map = _map(tiny_checkpoint("deepseek_v3", **WIDE))
    batches = torch.randint(0, 256, (8, 64), generator=torch.Generator().manual_seed(0))
    collect_statistics(
        model_map,
        batches,
        tmp_path,
        device=torch.device("cpu"),
        seed=0,
        progress=lambda what, done, total: None,
    )
    found = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    predicted = sum(sum(stored_moment_bytes(p)) for p in model_map.parameters.values() if p.compress)
    assert predicted + stored_vocabulary_bytes(model_map) == pytest.approx(found, rel=0.05)


def test_more_layers_take_more_disk_and_time_but_no_more_memory(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = (
        _map(tiny_checkpoint("deepseek_v3", num_hidden_layers=count, first_k_dense_replace=0, **WIDE))
        for count in (2, 6)
    )
    text = TextSize(2, 1, 64)
    disk, peak = {}, {}
    for name, model_map in (("few", few), ("many", many)):
        matrices = weight_matrices(model_map.parameters.values())
        disk[name] = disk_bytes(model_map, matrices, text, model_map.stored_numel // 2)
        peak[name] = work_bytes(model_map, matrices, text, device=torch.device("cpu"))
    assert disk["many"] > 2.4 * disk["few"]
    matrices = weight_matrices(many.parameters.values())
    with_noise = disk_bytes(many, matrices, text, 1)
    monkeypatch.setattr(module, "noise_room", lambda model_map, stored: 0)
    kept = [
        m for m in matrices if m.role in EMBEDDING_ROLES or m.name.startswith("model.layers.1.mlp.experts")
    ]
    assert with_noise - disk_bytes(many, matrices, text, 1) == 2 * sum(m.weights for m in kept)
    assert peak["few"] <= peak["many"] < 1.3 * peak["few"]
    monkeypatch.setattr(timing, "_clock", lambda run: (run(), 1.0)[1])  # other work must not decide
    monkeypatch.setattr(timing, "TIMING_REPEATS", {"cpu": 1, "gpu": 1})
    forecasts = [
        forecast(
            m,
            text,
            states=1 << 12,
            probed_layers=16,
            ranks=True,
            budget=1,
            device=torch.device("cpu"),
            started=time.monotonic() - 5.0,
        )
        for m in (few, many)
    ]
    assert all(5.0 <= found.seconds["start"] < 60.0 for found in forecasts)
    assert forecasts[1].seconds["encode"] > 1.5 * forecasts[0].seconds["encode"]


@pytest.mark.parametrize("effort", ["fast", "best"])
def test_a_dry_run_reports_the_forecast(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, effort: str
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 100)
    hints: list[str] = []
    report = compress(
        tiny_checkpoint("llama"), tmp_path / "out", calibration=[text], calibration_only=True, nsamples=4, seqlen=32,
        effort=effort, ratio=2.0, dry_run=True, hint=hints.append,
    )  # fmt: skip
    expected = report.to_dict()["forecast"]
    assert (expected["seconds"]["recovery"] > 0) == (effort == "best")
    assert set(expected["seconds"]) == {
        "start",
        "statistics",
        "arms",
        "probe",
        "encode",
        "recovery",
        "measure",
    }
    assert all(seconds > 0 for phase, seconds in expected["seconds"].items() if phase != "recovery")
    assert expected["total_seconds"] == pytest.approx(sum(expected["seconds"].values()))
    assert expected["peak_rss_bytes"] > 50e6
    assert any("of memory at its peak" in hint for hint in hints)


NO_TIME = run_time.Rates((), *[0.0] * 10)


def test_attention_takes_the_square_of_the_sequences_length(tiny_checkpoint: Callable[..., Path]) -> None:
    model_map = _map(tiny_checkpoint("llama"))
    outputs = sum(p.shape[1] for p in model_map.parameters.values() if p.role == "o")
    rates = replace(NO_TIME, attention=1.0, statistics_attention=4.0, backward_attention=6.0)
    for length in (64, 512):
        text = TextSize(sequences=5, held_out=2, length=length, gradient_every=2)
        seconds = run_time.phase_seconds(model_map, rates, text, states=1 << 12, probed_layers=16)
        assert seconds["statistics"] == (5 * 4.0 + 3 * 6.0) * length**2 * outputs
        checked = min(256, length)
        assert (
            seconds["measure"] == (2 * length**2 + checked**2) * outputs
        )  # the changed model, and the artifact


def test_experts_weights_take_time_in_every_chunk(tiny_checkpoint: Callable[..., Path]) -> None:
    model_map = _map(tiny_checkpoint("deepseek_v3"))
    weights = sum(p.numel for p in model_map.parameters.values() if len(p.shape) == 3)
    rates = replace(NO_TIME, weights=1.0, statistics_weights=10.0)
    text = TextSize(
        sequences=12, held_out=2, length=4096, gradient_every=2
    )  # so many tokens reach all experts
    seconds = run_time.phase_seconds(model_map, rates, text, states=1 << 12, probed_layers=16)
    # A product in each of four chunks forward, and two products in each of two chunks backward.
    assert seconds["statistics"] == pytest.approx((4 + 2 * 2) * 10.0 * weights)
    assert seconds["measure"] == pytest.approx(3 * weights)


def test_rates_are_the_least_of_two_measurements(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = timing.TIMED_FEW_TOKENS
    names = [field.name for field in fields(run_time.Rates) if field.name != "matrices"]
    slow_start = dict.fromkeys(names, 2.0) | {"weights": 5.0 * tokens, "statistics_weights": 1.0}
    after = dict.fromkeys(names, 1.0) | {"attention": 3.0, "weights": 4.0 * tokens, "statistics_weights": 1.0}
    rounds = iter((slow_start, after))
    monkeypatch.setattr(run_time, "_product_rates", lambda *arguments: next(rounds))
    rates = run_time.measure_rates(
        _map(tiny_checkpoint("llama")), [], ranks=False, device=torch.device("cpu")
    )
    assert (rates.product, rates.attention) == (1.0, 2.0)
    assert rates.weights == 3.0 * tokens  # less `tokens` tokens at the least time of a product
    assert rates.statistics_weights == 0.0  # never negative


def test_every_matrix_is_read_to_price_probe_and_code_it(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model_map = _map(tiny_checkpoint("deepseek_v3"))
    two_at_once = replace(processor(), side_by_side=lambda matrix: 2)
    monkeypatch.setattr(run_time, "processor", lambda: two_at_once)
    no_work = dict.fromkeys(("arms", "outputs of arms", "probe", "encode", "outputs", "state", "decode"), 0.0)
    matrices = weight_matrices(model_map.parameters.values())
    weights, experts_weights = (
        sum(m.weights for m in matrices if m.role.startswith(prefix)) for prefix in ("", "expert")
    )
    executed = sum(parameter.numel for parameter in run_time.executed(model_map))
    rates = replace(NO_TIME, matrices=tuple((matrix, 1, no_work) for matrix in matrices), read=1.0)
    text = TextSize(sequences=4, held_out=2, length=64)
    seconds = run_time.phase_seconds(model_map, rates, text, states=1 << 12, probed_layers=16)
    assert seconds["statistics"] == 2 * executed
    assert seconds["arms"] == seconds["encode"] == pytest.approx(weights / 2)
    assert seconds["probe"] == pytest.approx(weights / 2 + 2 * executed + 4 * experts_weights)


def _native_search(targets: torch.Tensor, bits: float, L: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes, decoded = fronts.native_search(targets.cpu(), bits, L)
    return codes.to(targets.device), decoded.to(targets.device)


@pytest.mark.parametrize("role", ["expert_gate_up", "expert_down", "q"])
def test_a_device_is_timed_where_it_is_and_by_how_much_of_it_is_filled(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = WeightMatrix("", None, role, 64, 96)
    clock = timing._clock
    ran: list[float] = []

    def one_second(run: Callable[[], object]) -> float:
        ran.append(clock(run))
        return 1.0

    monkeypatch.setattr(timing, "_clock", one_second)
    monkeypatch.setattr(timing, "TIMED_SIZE", 48)
    seconds = []
    for filled in (1.0, 0.25):

        def occupancy(rows: int, cols: int, two_sided: bool, filled: float = filled) -> float:
            return filled if rows == 48 else 1.0  # the timed matrix fills less than the real one

        rounder = partial(fronts.round_matrix, search=_native_search)
        machine = Machine("a stand-in", DEVICE, rounder, lambda matrix: 1, occupancy)
        with SecondDevice():
            times = timing.time_matrix(matrix, machine, ranks=True, pooled=role != "q")
        seconds.append(times["encode"])
    assert len(ran) > 10
    assert seconds[0] - seconds[1] == pytest.approx(0.75 * 64 * 96 / 48**2)


def test_pooled_experts_share_what_the_forecast_says(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model_map = _map(tiny_checkpoint("deepseek_v3"))
    matrices = weight_matrices(model_map.parameters.values())
    assert not any(run_time.pools_statistics(model_map, matrix) for matrix in matrices)
    monkeypatch.setattr(experts, "FULL_MOMENTS_BYTES", 1000)
    pooled = {matrix.role for matrix in matrices if run_time.pools_statistics(model_map, matrix)}
    assert pooled == {"expert_gate_up", "expert_down"}
    monkeypatch.setattr(timing, "_clock", lambda run: (run(), 1.0)[1])
    monkeypatch.setattr(timing, "TIMED_SIZE", 16)
    wide = WeightMatrix("", None, "expert_gate_up", 32, 64)
    alone = replace(processor(), side_by_side=lambda matrix: 1)  # for any number of threads
    own, shared = (timing.time_matrix(wide, alone, ranks=False, pooled=pooled) for pooled in (False, True))
    factor_inputs, factor_outputs = (timing.factor_growth(1.0, 16, n, lambda _: 1.0) for n in (64, 32))
    shared_inputs, shared_outputs = (64 / 16) ** 2, (32 / 16) ** 2
    saved = factor_inputs - shared_inputs
    assert own["arms"] - shared["arms"] == pytest.approx(saved)
    assert own["outputs of arms"] - shared["outputs of arms"] == factor_outputs - shared_outputs
    assert own["probe"] - shared["probe"] == pytest.approx(saved)  # sorted rows: an order of its own
    assert own["encode"] == pytest.approx(shared["encode"])


def test_factorisations_grow_by_what_two_sizes_take() -> None:
    def seconds(size: int) -> float:
        return 3e-6 * size**2 + 2e-9 * size**3

    for size in (100, 150, 200, 1000, 10000):
        expected = max(1.0, seconds(size) / seconds(100))
        assert timing.factor_growth(seconds(100), 100, size, seconds) == pytest.approx(expected)
    # A time that grows by less than the square, as those of small matrices do, counts as its square.
    assert timing.factor_growth(1.0, 100, 1000, lambda _: 2.0) == pytest.approx(50.0)
    assert timing.factor_growth(1.0, 100, 80, seconds) == 1.0


def test_the_search_takes_time_in_proportion_to_its_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "TIMED_SIZE", 32)
    monkeypatch.setattr(timing, "_clock", lambda run: (run(), 1.0)[1])
    windows: list[int] = []
    rounded = timing.round_prepared

    def noted(*args: Any, L: int, **options: Any) -> Any:
        windows.append(L)
        return rounded(*args, L=L, **options)

    def clock(run: Callable[[], object]) -> float:
        windows.clear()
        run()
        return 2.0 + (1 << windows[0]) / 1000 if windows else 1.0

    monkeypatch.setattr(timing, "round_prepared", noted)
    monkeypatch.setattr(timing, "_clock", clock)
    alone = replace(processor(), side_by_side=lambda matrix: 1)
    times = timing.time_matrix(WeightMatrix("", None, "q", 32, 32), alone, ranks=False, pooled=False)
    assert times["state"] == pytest.approx(1 / 1000)
    # H from its file, its factors, preparation: one second each.
    assert times["encode"] == pytest.approx(2 + 3.0)
    assert times["outputs"] == pytest.approx(2.0)


def test_times_are_printed_in_their_unit() -> None:
    assert "2 h 05 min" in module.Forecast({"encode": 7500.0}, 10**9, 10**9).sentence()
    assert "take 3 min" in module.Forecast({"encode": 185.0}, 10**9, 10**9).sentence()
    assert "take 43 s," in module.Forecast({"encode": 43.4}, 10**9, 10**9).sentence()
    assert "take 1 s," in module.Forecast({"encode": 0.0}, 10**9, 10**9).sentence()
