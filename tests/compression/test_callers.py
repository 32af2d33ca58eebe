"""`compress` in a program that has set torch's modes, or that starts several runs at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import compress_tiny, weights_of
from transformers import AutoModelForCausalLM

import ciuic_cli
from ciuic_cli.compression import options
from ciuic_cli.errors import EnvironmentFault, UsageError


@contextmanager
def default(setter: Callable[[Any], object], value: Any, before: Any) -> Any:
    setter(value)
    try:
        yield
    finally:
        setter(before)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "float64": lambda: default(torch.set_default_dtype, torch.float64, torch.float32),
    "bfloat16": lambda: default(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "meta device": lambda: default(torch.set_default_device, "meta", None),
    "device block": lambda: torch.device("meta"),
}
PAIRS = [
    ("no_grad", "float64"),
    ("inference_mode", "meta device"),
    ("autocast", "device block"),
    ("bfloat16",),
]
"""Every mode once, because a run takes seconds. No mode of a pair hides what the other changes."""


def state() -> tuple[object, ...]:
    """The modes of torch that a run must leave as they were."""
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads(),
    )  # fmt: skip


@pytest.fixture(scope="module")
def plain(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, Path], bytes]:
    """The weights of a run without any mode, by effort."""
    made: dict[str, bytes] = {}

    def make(effort: str, text: Path) -> bytes:
        if effort not in made:
            out = tmp_path_factory.mktemp("plain") / "out"
            compress_tiny(tiny_checkpoint("deepseek_v3"), out, text, effort=effort)
            made[effort] = weights_of(out)
        return made[effort]

    return make


@pytest.mark.parametrize("modes", PAIRS, ids=" and ".join)
def test_a_callers_modes_change_no_byte(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    text: Path,
    plain: Callable[..., bytes],
    modes: tuple[str, ...],
) -> None:
    source, expected = tiny_checkpoint("deepseek_v3"), plain("fast", text)
    with ExitStack() as entered:
        for mode in modes:
            entered.enter_context(MODES[mode]())
        before = state()
        compress_tiny(source, tmp_path / "out", text)
        assert state() == before
    assert weights_of(tmp_path / "out") == expected


def test_a_callers_modes_do_not_reach_recovery(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    text: Path,
    plain: Callable[..., bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(
        options.EFFORTS,
        "best",
        options.Effort(states=1 << 12, nsamples=6, probed_layers=16, recovery_steps=4),
    )
    source, expected = tiny_checkpoint("deepseek_v3"), plain("best", text)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        compress_tiny(source, tmp_path / "out", text, effort="best")
    assert weights_of(tmp_path / "out") == expected


@pytest.mark.parametrize("mode", ["inference_mode", "float64", "meta device"])
def test_a_model_is_compressed_in_place_in_any_mode(
    tiny_checkpoint: Callable[..., Path], text: Path, mode: str
) -> None:
    ids, logits = torch.arange(10)[None], []
    for context in (nullcontext, MODES[mode]):
        model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint("llama_tied"))
        with context():
            ciuic_cli.apply_ciuic_compression(
                model,
                effort="fast",
                nsamples=6,
                seqlen=48,
                calibration=[text],
                calibration_only=True,
                ratio=2.0,
            )
        logits.append(model(ids).logits)
    assert torch.equal(*logits)


def test_a_second_run_of_a_process_is_refused_and_harms_nothing(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path, plain: Callable[..., bytes]
) -> None:
    source, expected, before = tiny_checkpoint("deepseek_v3"), plain("fast", text), state()
    started, refused = threading.Event(), threading.Event()

    def wait(phase: str, done: int, total: int) -> None:
        started.set()
        assert refused.wait(60)

    first = threading.Thread(
        target=lambda: compress_tiny(source, tmp_path / "first", text, progress=wait), daemon=True
    )
    first.start()
    assert started.wait(60)
    with pytest.raises(EnvironmentFault, match="another compression is running") as caught:
        compress_tiny(source, tmp_path / "second", text)
    assert "has ended" in (caught.value.remedy or "")
    refused.set()
    first.join()
    assert weights_of(tmp_path / "first") == expected
    assert state() == before and not (tmp_path / "second").exists()
    compress_tiny(source, tmp_path / "second", text)
    assert weights_of(tmp_path / "second") == expected


def test_a_model_with_an_adapter_is_refused_until_it_is_merged(
    tiny_checkpoint: Callable[..., Path], text: Path
) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoTokenizer

    source = tiny_checkpoint("llama")
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(base, config)
    before = dict(wrapped.state_dict())
    for model in (wrapped, wrapped.get_base_model()):
        with pytest.raises(UsageError, match="PEFT adapter") as caught:
            ciuic_cli.apply_ciuic_compression(model, calibration=[text])
        assert "merge_and_unload" in (caught.value.remedy or "")
    assert all(torch.equal(before[name], value) for name, value in wrapped.state_dict().items())
    merged = wrapped.merge_and_unload()
    ids = torch.randint(3, 263, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = merged(ids).logits
        done = ciuic_cli.apply_ciuic_compression(
            merged, AutoTokenizer.from_pretrained(source), calibration=[text], calibration_only=True,
            effort="fast", nsamples=6, seqlen=48, ratio=2.0,
        )  # fmt: skip
        found = done(ids).logits
    assert float((found - expected).square().mean() / expected.var()) < 0.1
