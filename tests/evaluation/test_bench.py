"""What `ciuic bench` measures, its ratios, and how a measuring process that fails is reported."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tiny_checkpoints import TINY_CONFIGS
from transformers import DynamicCache

from ciuic_cli.cli.console import Console
from ciuic_cli.cli.tables import show_bench
from ciuic_cli.errors import CiuicError, EnvironmentFault, InputError, UsageError
from ciuic_cli.evaluation import bench as module
from ciuic_cli.evaluation import bench_process
from ciuic_cli.evaluation.bench import bench
from ciuic_cli.evaluation.bench_process import fitted, measure, storage_bytes

QUICK: dict[str, Any] = {
    "prompt_tokens": 24,
    "new_tokens": 3,
    "repetitions": 2,
    "batch_size": 1,
    "device": "cpu",
    "contexts": [8, 40],
}


def stored_bytes(folder: Path) -> int:
    """Bytes of the tensors in a model file, without its header."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.fixture(scope="module")
def found(artifact: tuple[Path, Path]) -> tuple[dict[str, Any], list[tuple[str, int, int]]]:
    """The result of a whole run, with a process for each model, and the progress that it reported."""
    steps: list[tuple[str, int, int]] = []
    original, out = artifact
    result = bench(out, base=original, **QUICK, progress=lambda *step: steps.append(step))
    return result, steps


def test_each_model_is_measured_in_its_own_process(found: tuple[dict[str, Any], list[Any]]) -> None:
    result, steps = found
    assert set(result) == {"options", "model", "base", "ratios"}
    assert steps == [(label, done, 6) for label in ("model", "base") for done in range(7)]
    for figures in (result["model"], result["base"]):
        assert figures["device"] == "cpu"
        assert figures["load_seconds"] > 0
        # The interpreter with torch alone takes more than 50 MB.
        assert 50e6 < figures["rss_bytes"] <= figures["peak_rss_bytes"]
        assert figures["rss_growth_bytes"] <= figures["peak_growth_bytes"] < figures["peak_rss_bytes"]
        for speed in (figures["prefill"], figures["decode"]):
            assert speed["mean"] > 0
            assert math.isfinite(speed["stdev"])


def test_bytes_are_those_of_the_files_and_of_the_tensors(
    found: tuple[dict[str, Any], list[Any]], artifact: tuple[Path, Path]
) -> None:
    result, _ = found
    frequencies = 2 * 6 * 4  # the two rotary frequency buffers, half of head_dim 12, float32
    for folder, figures in zip(artifact, (result["base"], result["model"]), strict=True):
        assert figures["file_bytes"] == (folder / "model.safetensors").stat().st_size
        assert figures["weight_bytes"] == stored_bytes(folder) + frequencies


def test_both_models_are_related_to_one_bandwidth(found: tuple[dict[str, Any], list[Any]]) -> None:
    model, base = found[0]["model"], found[0]["base"]
    assert model["bandwidth"] == base["bandwidth"]
    for figures in (model, base):
        for step in figures["decode_at"]:
            assert step["of_bandwidth"] * figures["bandwidth"] == pytest.approx(step["bytes_per_second"])


def test_the_peak_does_not_contain_the_memory_that_the_bandwidth_takes(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    for name in ("peak_resident_bytes", "memory_bandwidth"):

        def noted(*_: Any, name: str = name) -> int:
            calls.append(name)
            return 1 << 40

        monkeypatch.setattr(bench_process, name, noted)
    measure(tiny_checkpoint("llama"), **QUICK)
    assert calls[-2:] == ["peak_resident_bytes", "memory_bandwidth"]


def test_ratios_are_above_one_where_the_model_is_better(found: tuple[dict[str, Any], list[Any]]) -> None:
    result, _ = found
    model, base, ratios = result["model"], result["base"], result["ratios"]
    assert ratios["weight_bytes"] == pytest.approx(base["weight_bytes"] / model["weight_bytes"])
    assert ratios["weight_bytes"] > 2.5
    assert ratios["decode"] == pytest.approx(model["decode"]["mean"] / base["decode"]["mean"])
    assert ratios["prefill"] == pytest.approx(model["prefill"]["mean"] / base["prefill"]["mean"])


def test_an_original_that_does_not_fit_is_described_by_its_files(
    artifact: tuple[Path, Path],
    found: tuple[dict[str, Any], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    original, out = artifact
    whole, _ = found
    measured = module._in_own_process

    def without_room(path: Path, options: dict[str, Any], progress: Any) -> dict[str, Any]:
        if path == original:
            raise EnvironmentFault("the weights take 9.0 GB; 1.0 GB are free on cpu", file=path)
        return measured(path, options, progress)

    monkeypatch.setattr(module, "_in_own_process", without_room)
    hints: list[str] = []
    result = bench(out, base=original, **QUICK, hint=hints.append)
    for what in ("base", "ratios"):  # a loaded model also has buffers
        expected = {name: whole[what][name] for name in ("file_bytes", "weight_bytes")}
        assert result[what] == pytest.approx(expected, rel=1e-3)
    assert len(hints) == 1 and hints[0].startswith("the original was not measured: the weights take 9.0 GB")
    show_bench(Console(), result, "out")
    rows = {line.split("│")[0].strip(): line for line in capsys.readouterr().out.splitlines()}
    assert "3.0" in rows["files"] and "tokens/s" in rows["decode, tokens/s"]
    with pytest.raises(EnvironmentFault, match="the weights take"):
        bench(original, **QUICK)


def test_speed_counts_all_tokens_of_the_batch_and_not_the_warm_up(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = iter([(100.0, 100.0), (0.5, 0.2), (0.25, 0.4)])
    monkeypatch.setattr(bench_process, "_time_once", lambda *arguments: next(taken))
    figures = measure(str(tiny_checkpoint("llama")), **{**QUICK, "batch_size": 5})
    assert figures["prefill"]["mean"] == pytest.approx((5 * 24 / 0.5 + 5 * 24 / 0.25) / 2)
    assert figures["prefill"]["stdev"] == pytest.approx((5 * 24 / 0.25 - 5 * 24 / 0.5) / math.sqrt(2))
    assert figures["decode"]["mean"] == pytest.approx((5 * 3 / 0.2 + 5 * 3 / 0.4) / 2)


def test_one_repetition_has_no_deviation(tiny_checkpoint: Callable[..., Path]) -> None:
    figures = measure(str(tiny_checkpoint("llama")), **{**QUICK, "repetitions": 1})
    assert figures["decode"]["stdev"] is None


def test_every_step_reuses_the_cache(tiny_checkpoint: Callable[..., Path]) -> None:
    """The prompt goes in once, then one token at a time; without the cache the inputs would grow."""
    from ciuic_cli.evaluation.opening import open_model

    model = open_model(tiny_checkpoint("llama"), "cpu")
    lengths: list[tuple[int, int]] = []
    keyword = bench_process.cache_keyword(model)

    def note(_module: Any, arguments: Any, keywords: dict[str, Any], _output: Any) -> None:
        lengths.append((keywords["input_ids"].shape[1], keywords[keyword].get_seq_length()))

    model.register_forward_hook(note, with_kwargs=True)
    with torch.inference_mode():
        bench_process._time_once(model, torch.zeros(2, 10, dtype=torch.long), 3, torch.device("cpu"))
    assert lengths == [(10, 10), (1, 11), (1, 12), (1, 13)]


def test_shared_memory_is_counted_once() -> None:
    whole = torch.zeros(100, dtype=torch.float32)
    other = torch.zeros(7, dtype=torch.bfloat16)
    assert storage_bytes([whole, whole[10:20], whole.view(10, 10), other]) == 400 + 14


def test_a_tied_head_is_counted_once(tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint("llama_tied")
    figures = measure(str(folder), **{**QUICK, "repetitions": 1})
    assert figures["weight_bytes"] == stored_bytes(folder) + 2 * 6 * 4


# --- the measuring process


@pytest.mark.slow
def test_every_family_is_measured_in_a_fresh_process(tiny_checkpoint: Callable[..., Path]) -> None:
    """Some families' code registers kinds of cache layers in transformers; a fresh process has imported none of it."""
    code = (
        "import json, sys; from ciuic_cli.evaluation.bench_process import measure; "
        "options = json.loads(sys.argv[1]); "
        "print([measure(path, **options)['dtype'] for path in sys.argv[2:]])"
    )
    folders = [str(tiny_checkpoint(family)) for family in sorted(TINY_CONFIGS)]
    options = json.dumps({**QUICK, "repetitions": 1})
    done = subprocess.run(
        [sys.executable, "-c", code, options, *folders],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(["bfloat16"] * len(folders))


@pytest.mark.parametrize(
    ("asked", "positions", "settled"),
    [
        ((None, None), None, (512, 128)),
        ((None, None), 4096, (512, 128)),
        ((None, None), 512, (410, 102)),
        ((600, None), 640, (600, 40)),
        ((None, 40), 64, (24, 40)),
        ((7, 9), 8, (7, 9)),
        ((300, None), 256, (300, 1)),
        ((None, 300), 256, (1, 300)),
        ((None, None), 2, (1, 1)),
    ],
)
def test_tokens_that_are_not_asked_for_fit_the_positions(
    asked: tuple[int | None, int | None], positions: int | None, settled: tuple[int, int]
) -> None:
    assert fitted(*asked, positions) == settled


def test_fewer_positions_than_the_defaults_need_give_a_hint(tiny_checkpoint: Callable[..., Path]) -> None:
    hints: list[str] = []
    options = {**QUICK, "repetitions": 1, "prompt_tokens": None, "new_tokens": None}
    found = bench(tiny_checkpoint("llama"), **options, hint=hints.append)
    assert hints == ["the model has positions for -p 205 -n 51"]
    assert found["options"]["prompt_tokens"] == found["model"]["prompt_tokens"] == 205


def test_errors_come_back_as_they_were_raised(tiny_checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(UsageError, match="ask for 303 tokens, the model has 256 positions") as caught:
        bench(tiny_checkpoint("llama"), **{**QUICK, "prompt_tokens": 300})
    assert caught.value.file == str(tiny_checkpoint("llama"))
    assert caught.value.remedy == "use a smaller -p or -n"


@pytest.mark.parametrize("family", sorted(TINY_CONFIGS))
def test_token_bytes_are_a_lower_bound_of_the_cache(
    tiny_checkpoint: Callable[..., Path], family: str
) -> None:
    from ciuic_cli.evaluation.opening import open_model

    model = open_model(tiny_checkpoint(family), "cpu")
    batch, prompt = 2, 24
    with torch.inference_mode():
        ids = torch.ones(batch, prompt, dtype=torch.long)
        cache = DynamicCache(config=model.config)
        model(input_ids=ids, use_cache=True, logits_to_keep=1, **{bench_process.cache_keyword(model): cache})
    held = storage_bytes(
        tensor for layer in cache.layers for tensor in (layer.keys, layer.values) if tensor is not None
    )
    config = model.config
    other_bytes = batch * (8 * prompt + 2 * (prompt * config.hidden_size + config.vocab_size))
    counted = bench_process.token_bytes(config, prompt, 0, batch) - other_bytes
    assert 0.5 * held <= counted <= held


@pytest.mark.parametrize("absurd", [{"batch_size": 10**9}, {"new_tokens": 10**12}])
def test_tokens_that_do_not_fit_are_refused_before_anything_is_loaded(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, absurd: dict[str, int]
) -> None:
    monkeypatch.setattr(bench_process, "open_model", lambda *arguments: pytest.fail("the model was loaded"))
    monkeypatch.setattr(bench_process, "max_positions", lambda config: None)
    with pytest.raises(EnvironmentFault, match=r"take at least [0-9.e+]+ GB.* are free on cpu") as caught:
        measure(str(tiny_checkpoint("llama")), **{**QUICK, **absurd})
    assert caught.value.remedy == "use a smaller -p, -n or --batch-size"


def test_a_folder_that_is_no_model_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json"):
        measure(str(tmp_path), **QUICK)


@pytest.mark.parametrize(
    ("script", "kind", "message"),
    [
        ("echo out of room >&2; kill -9 $$", EnvironmentFault, "killed by signal 9: out of room"),
        ("echo ValueError: what >&2; exit 1", CiuicError, "failed with code 1: ValueError: what"),
        ("exit 0", CiuicError, "failed with code 0: it wrote nothing to stderr"),
    ],
    ids=["killed", "failed", "silent"],
)
def test_a_measuring_process_that_dies_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, kind: type[CiuicError], message: str
) -> None:
    child = tmp_path / "python"
    child.write_text(f"#!/bin/sh\n{script}\n")
    os.chmod(child, 0o755)
    monkeypatch.setattr(module.sys, "executable", str(child))
    with pytest.raises(kind, match=message) as caught:
        bench(tmp_path, **QUICK)
    assert caught.value.exit_code == kind.exit_code


def test_what_a_library_prints_does_not_mix_with_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def chatty(**request: Any) -> dict[str, Any]:
        os.write(1, b"loading...\n")
        return {"weight_bytes": 3, **request["answer"]}

    monkeypatch.setattr(bench_process, "measure", lambda progress, **request: chatty(**request))
    kept = os.dup(1)
    try:
        bench_process.main('{"answer": {"decode": 2}}')
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    captured = capfd.readouterr()
    assert captured.out == '{"weight_bytes": 3, "decode": 2}\n'
    assert "loading..." in captured.err
