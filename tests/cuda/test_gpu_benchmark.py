"""benchmarks/gpu.py: its checks on the emulated device, its models on the CPU."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from emulation import Emulator

from ciuic_cli.kernels.launcher import LAUNCHERS


@pytest.fixture
def gpu_checks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("gpu_checks")


def test_right_kernels_pass(emulator: Emulator, gpu_checks: ModuleType) -> None:
    checks = gpu_checks.run(torch.device("cpu"), small=True)
    assert [check for check in checks if not check.passed] == []
    assert len(checks) > 80 and LAUNCHERS[torch.device("cpu")] is emulator


def test_a_write_outside_and_an_unwritten_element_fail(emulator: Emulator, gpu_checks: ModuleType) -> None:
    with gpu_checks.guarded(torch.device("cpu")) as launcher:
        out = launcher.empty((4, 4), torch.float32)
        assert out.isnan().all()
        assert launcher.verify()
        launcher.empty((4, 4), torch.float32)
        launcher.buffers[0][-1] = 0
        assert not launcher.verify()
    assert not gpu_checks.Check("unwritten", float("nan"), 1.0).passed


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_the_exit_code_is_5(
    gpu_checks: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    gpu = importlib.import_module("gpu")
    with pytest.warns(RuntimeWarning):
        assert gpu.main() == 5
    assert "no GPU" in capsys.readouterr().err


def test_a_step_keeps_its_figures_and_takes_up_what_was_left_out(
    gpu_checks: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps, file, done = importlib.import_module("gpu_steps"), tmp_path / "gpu" / "step.json", []

    def fail() -> None:
        raise RuntimeError("out of luck")

    for repeat in range(2):
        record = steps.Record(file, {"gpu": "one"})
        assert record.piece("rate", lambda: done.append(1) or 7, 1) == 7
        assert record.piece("broken", fail, 1) is None
        assert record.piece("long", lambda: done.append(2), 1e9) is None
        stored = json.loads(file.read_text())
        assert stored["pieces"] == {"rate": 7} and len(stored["left_out"]) == 2, repeat
    assert done == [1]
    assert "out of luck" in capsys.readouterr().err
    other = steps.Record(file, {"gpu": "another"})
    assert other.piece("rate", lambda: 8, 1) == 8
    assert json.loads(file.read_text())["environment"] == {"gpu": "another"}


def test_the_two_devices_kl_is_compared_by_its_standard_error(gpu_checks: ModuleType) -> None:
    runs = importlib.import_module("gpu_runs")
    on = {"measured_kl": 0.010, "measured_kl_stderr": 0.001, "seconds": 2.0}
    same = runs.compare(on, on | {"measured_kl": 0.0125, "seconds": 6.0})
    assert same["equal"] and same["times_cpu"] == 3.0
    assert not runs.compare(on, on | {"measured_kl": 0.014})["equal"]


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
def test_models_run_in_both_forms(
    gpu_checks: ModuleType, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    gpu_models = importlib.import_module("gpu_models")
    small = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32, "n_routed_experts": 4}
    small |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "num_experts_per_tok": 2}
    known = gpu_models.CONFIGS[family]
    tiny = known | {name: value for name, value in small.items() if name in known}
    monkeypatch.setitem(gpu_models.CONFIGS, family, tiny)
    monkeypatch.setattr(gpu_models, "_CONTEXT", 8)
    line = gpu_models.run(family, layers=2, device="cpu")
    assert 3.0 < line["bf16_bytes"] / line["bytes"] < 4.0
    assert line["layers"] == 2


def test_losses_of_two_runs_are_compared(
    gpu_checks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, sample = importlib.import_module("gpu_training"), importlib.import_module("gpu_runs").SAMPLE
    options = {"method": "full", "max_steps": 2, "sequence_len": 128}
    both = training.on_both(sample, options, tmp_path, devices=("cpu", "cpu"))
    assert both["largest_difference"] == 0.0 and len(both["losses"][0]) == 2
    monkeypatch.setattr(
        training, "LARGE_CONFIG", training.LARGE_CONFIG | {"num_hidden_layers": 1, "hidden_size": 64}
    )
    large = training.large(options, tmp_path, device="cpu")
    assert large["gigabytes"] > 0 and len(large["losses"]) == 2
