"""Perplexity, KL divergence and their errors against independent computations; refusals before any work."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import ciuic_cli
from ciuic_cli.compression.pipeline import compress
from ciuic_cli.errors import InputError, UsageError
from ciuic_cli.evaluation import perplexity as module
from ciuic_cli.evaluation.estimates import mean_of
from ciuic_cli.evaluation.opening import open_model
from ciuic_cli.evaluation.perplexity import evaluate, generate_text, token_figures, windows_of


@pytest.fixture(scope="module")
def artifact(
    tiny_checkpoint: Callable[..., Path], text: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """The original and its artifact."""
    original, out = tiny_checkpoint("llama"), tmp_path_factory.mktemp("artifact") / "out"
    compress(original, out, ratio=3.0, calibration=[text], nsamples=4, seqlen=64, effort="fast")
    return original, out


def log_probabilities(model: Any, window: torch.Tensor) -> np.ndarray:
    """(tokens, vocabulary) in float64, without torch's softmax."""
    with torch.no_grad():
        logits = model(window[None]).logits[0, :-1].double().numpy()
    return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)


def dense(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def expected_windows(text: Path, seqlen: int) -> list[torch.Tensor]:
    """BOS (0) and the text's bytes, as the byte-level tokenizer of the tests numbers them."""
    tokenizer = json.loads((text.parent / "vocabulary.json").read_text())
    ids = [tokenizer[character] for character in text.read_text().strip("\n").replace(" ", "Ġ") + "ĊĊ"]
    starts = range(0, len(ids), seqlen - 1)
    windows = [torch.tensor([0, *ids[start : start + seqlen - 1]]) for start in starts]
    return [window for window in windows if len(window) > 32]


@pytest.fixture(scope="module", autouse=True)
def vocabulary(tiny_checkpoint: Callable[..., Path], text: Path) -> None:
    content = json.loads((tiny_checkpoint("llama") / "tokenizer.json").read_text())
    (text.parent / "vocabulary.json").write_text(json.dumps(content["model"]["vocab"]))


def test_perplexity_equals_an_independent_computation(
    tiny_checkpoint: Callable[..., Path], text: Path
) -> None:
    folder = tiny_checkpoint("llama")
    windows = expected_windows(text, 100)
    model = dense(folder)
    nll = np.concatenate(
        [-log_probabilities(model, w)[np.arange(len(w) - 1), w[1:].numpy()] for w in windows]
    )
    found = evaluate(folder, text=text, seqlen=100, device="cpu")
    assert found["tokens"] == nll.size == len(text.read_text()) + 2
    assert found["windows"] == len(windows) == 12
    assert found["perplexity"] == pytest.approx(math.exp(nll.mean()), rel=1e-6)
    assert found["seqlen"] == 100
    assert "kl_mean" not in found


def test_divergence_of_a_model_from_itself_is_zero(tiny_checkpoint: Callable[..., Path], text: Path) -> None:
    folder = tiny_checkpoint("llama")
    found = evaluate(folder, base=folder, text=text, seqlen=64, limit=2, device="cpu")
    assert found["kl_mean"] == found["kl_median"] == found["kl_p99"] == 0.0
    assert found["top1_agreement"] == 1.0
    assert found["perplexity_ratio"] == 1.0
    assert found["perplexity_ratio_stderr"] == 0.0
    assert found["base_perplexity"] == found["perplexity"]


def changed(source: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def pair(
    tiny_checkpoint: Callable[..., Path], text: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What `evaluate` says of a model with noise in its weights, and the independent figures of each token."""

    def disturb(tensors: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(1)
        for name, tensor in tensors.items():
            if tensor.dim() == 2:
                noise = 0.1 * tensor.float().std() * torch.randn(tensor.shape, generator=generator)
                tensors[name] = tensor + noise.to(tensor.dtype)

    base = tiny_checkpoint("llama")
    other = changed(base, tmp_path_factory.mktemp("noisy") / "m", disturb)
    figures: dict[str, list[np.ndarray]] = {"kl": [], "same": [], "difference": []}
    first, second = dense(base), dense(other)
    for window in expected_windows(text, 100):
        p, q = log_probabilities(first, window), log_probabilities(second, window)
        target = (np.arange(len(window) - 1), window[1:].numpy())
        figures["kl"].append((np.exp(p) * (p - q)).sum(1))
        figures["same"].append(p.argmax(1) == q.argmax(1))
        figures["difference"].append(p[target] - q[target])
    found = evaluate(other, base=base, text=text, seqlen=100, device="cpu")
    return found, {name: np.concatenate(parts) for name, parts in figures.items()}


def test_divergence_equals_an_independent_computation(
    pair: tuple[dict[str, Any], dict[str, np.ndarray]],
) -> None:
    found, figures = pair
    assert 0.001 < figures["kl"].mean() < 1.0
    assert found["kl_mean"] == pytest.approx(figures["kl"].mean(), abs=1e-6)
    assert found["kl_median"] == pytest.approx(np.median(figures["kl"]), abs=1e-6)
    assert found["kl_p99"] == pytest.approx(np.quantile(figures["kl"], 0.99), abs=1e-6)
    assert found["top1_agreement"] == figures["same"].mean()
    assert 0.2 < found["top1_agreement"] < 0.8


def test_the_ratio_of_perplexities_is_that_of_its_parts(
    pair: tuple[dict[str, Any], dict[str, np.ndarray]],
) -> None:
    found, figures = pair
    assert found["perplexity_ratio"] == pytest.approx(math.exp(figures["difference"].mean()), rel=1e-6)
    assert found["perplexity_ratio"] == pytest.approx(
        found["perplexity"] / found["base_perplexity"], rel=1e-9
    )


def test_divergence_is_that_of_the_base_from_the_model() -> None:
    # KL(p || q) of p = (3/4, 1/4) and q = (1/2, 1/2) is ln 2 - H(p); the other direction is not.
    p, q = torch.tensor([[0.75, 0.25]]).log(), torch.tensor([[0.5, 0.5]]).log()
    found = token_figures(q, p, torch.tensor([1]))
    assert found["kl"][0] == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), abs=1e-7)
    assert found["nll"][0] == pytest.approx(math.log(2), abs=1e-7)
    assert found["base_nll"][0] == pytest.approx(math.log(4), abs=1e-7)


def test_blocks_do_not_change_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 50, 301, generator=generator) * 4
    targets = torch.randint(0, 301, (50,), generator=generator)
    whole = token_figures(logits[0], logits[1], targets)
    monkeypatch.setattr(module, "BLOCK_BYTES", 7 * 301 * 8)
    blocks = token_figures(logits[0], logits[1], targets)
    assert {name: part.shape for name, part in blocks.items()} == dict.fromkeys(whole, (50,))
    for name, values in whole.items():
        np.testing.assert_allclose(blocks[name], values, rtol=1e-12)


def test_the_artifact_is_measured_as_it_is_loaded(artifact: tuple[Path, Path], text: Path) -> None:
    original, out = artifact
    first, second = dense(original), ciuic_cli.load(out, device="cpu", dtype=torch.float32)
    divergences = []
    for window in expected_windows(text, 64)[:3]:
        p, q = log_probabilities(first, window), log_probabilities(second, window)
        divergences.append((np.exp(p) * (p - q)).sum(1))
    found = evaluate(out, base=original, text=text, seqlen=64, limit=3, device="cpu")
    assert found["tokens"] == 3 * 63
    assert found["dtype"] == "float32"
    assert found["kl_mean"] == pytest.approx(np.concatenate(divergences).mean(), abs=1e-6)
    assert 1e-5 < found["kl_mean"] < 1.0


# --- standard errors


def test_windows_are_the_samples_of_the_standard_error() -> None:
    # Tokens of a window are all alike: 20 samples of 50 tokens, not 1000 tokens.
    levels = np.random.default_rng(0).normal(3.0, 0.5, 20)
    found = mean_of([np.full(50, level) for level in levels])
    assert found.value == pytest.approx(levels.mean())
    assert found.stderr == pytest.approx(levels.std(ddof=1) / math.sqrt(20))
    assert found.samples == "windows"


def test_tokens_are_the_samples_where_windows_are_few() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    found = mean_of([values[:200], values[200:]])
    assert found.stderr == pytest.approx(values.std(ddof=1) / 20)
    assert found.samples == "tokens"


def test_the_standard_error_covers_the_truth() -> None:
    # Correlated tokens and a shorter last window: about 95 % of the intervals must contain the true mean.
    generator = np.random.default_rng(2)
    hits = 0
    for _ in range(400):
        levels = generator.normal(0.0, 1.0, 30)
        sizes = [40] * 29 + [17]
        found = mean_of(
            [level + generator.normal(0, 1, size) for level, size in zip(levels, sizes, strict=True)]
        )
        hits += abs(found.value) < 1.96 * found.stderr
    assert 0.90 < hits / 400 < 0.98


def test_stderr_is_that_of_the_perplexity(tiny_checkpoint: Callable[..., Path], text: Path) -> None:
    folder = tiny_checkpoint("llama")
    found = evaluate(folder, text=text, seqlen=100, device="cpu")
    model = dense(folder)
    parts = [
        -log_probabilities(model, w)[np.arange(len(w) - 1), w[1:].numpy()]
        for w in expected_windows(text, 100)
    ]
    assert found["stderr_samples"] == "windows"
    assert found["stderr"] == pytest.approx(found["perplexity"] * mean_of(parts).stderr, rel=1e-4)


# --- windows


def test_windows_begin_as_the_tokenizer_begins(tiny_checkpoint: Callable[..., Path], text: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint("llama"))
    found = windows_of(text.read_text(), tokenizer, 100, None)
    expected = expected_windows(text, 100)
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_windows_are_no_longer_than_the_positions(tiny_checkpoint: Callable[..., Path], text: Path) -> None:
    said: list[str] = []
    folder = tiny_checkpoint("llama")
    found = evaluate(folder, text=text, seqlen=1024, limit=1, device="cpu", hint=said.append)
    assert found["seqlen"] == 256
    assert said == ["windows of 256 tokens instead of 1,024: the model has no more positions"]
    evaluate(folder, text=text, seqlen=256, limit=1, device="cpu", hint=said.append)
    assert len(said) == 1


def test_a_window_without_room_is_refused(tiny_checkpoint: Callable[..., Path], text: Path) -> None:
    with pytest.raises(UsageError, match="--seqlen 2"):
        evaluate(tiny_checkpoint("llama"), text=text, seqlen=2)


# --- refusals


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n\n ", "is empty"),
        (b"a few words", "more than 32 are needed"),
        (b"caf\xe9 " * 100, r"not UTF-8 \(byte 3\)"),
        (None, "cannot be read"),
    ],
    ids=["empty", "blank", "short", "latin1", "absent"],
)
def test_unusable_text_is_refused_before_any_model_is_loaded(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes | None,
    message: str,
) -> None:
    loaded: list[object] = []
    monkeypatch.setattr(module, "open_model", lambda *arguments: loaded.append(arguments))
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        evaluate(tiny_checkpoint("llama"), text=file)
    assert caught.value.file == str(file) and not loaded


def test_an_absent_base_is_refused_before_any_model_is_loaded(
    tiny_checkpoint: Callable[..., Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[object] = []
    monkeypatch.setattr(module, "open_model", lambda *arguments: loaded.append(arguments))
    with pytest.raises(InputError, match="no such folder"):
        evaluate(tiny_checkpoint("llama"), base=tmp_path / "absent", text=text)
    assert not loaded


def test_models_of_other_vocabularies_are_not_compared(
    tiny_checkpoint: Callable[..., Path], text: Path
) -> None:
    with pytest.raises(InputError, match="the base predicts 300 tokens, the model 263"):
        evaluate(
            tiny_checkpoint("llama"), base=tiny_checkpoint("llama", vocab_size=300), text=text, device="cpu"
        )


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(
    tiny_checkpoint: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    shutil.copytree(tiny_checkpoint("llama", vocab_size=64), folder)
    with pytest.raises(InputError, match="the model has only 64") as caught:
        evaluate(folder, text=text, device="cpu")
    assert caught.value.file == str(folder / "tokenizer.json")
    with pytest.raises(InputError, match="the model has only 64"):
        generate_text(folder, "The mill", device="cpu", max_new_tokens=1)


def test_predictions_that_are_not_finite_are_no_result(
    tiny_checkpoint: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    def ruin(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"][:] = 3e38

    folder = changed(tiny_checkpoint("llama"), tmp_path / "m", ruin)
    with pytest.raises(InputError, match="not finite"):
        evaluate(folder, text=text, limit=1, device="cpu")


def test_an_fp8_original_is_evaluated_decoded(
    tiny_checkpoint: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    block, name = 32, "model.layers.1.mlp.down_proj.weight"

    def to_fp8(tensors: dict[str, torch.Tensor]) -> None:
        weight = tensors[name].float()
        grid = [-(-size // block) for size in weight.shape]
        scale = torch.linspace(0.002, 0.004, grid[0] * grid[1]).reshape(grid)
        spread = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
        spread = spread[: weight.shape[0], : weight.shape[1]]
        tensors[name] = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[name.replace("weight", "weight_scale_inv")] = scale

    def decoded(tensors: dict[str, torch.Tensor]) -> None:
        to_fp8(tensors)
        scale = tensors.pop(name.replace("weight", "weight_scale_inv"))
        spread = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
        weight = tensors[name].float()
        tensors[name] = weight * spread[: weight.shape[0], : weight.shape[1]]

    source = tiny_checkpoint("llama", dtype=torch.float32)
    reference = changed(source, tmp_path / "reference", decoded)
    fp8 = changed(source, tmp_path / "fp8", to_fp8)
    config = json.loads((fp8 / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [block, block]}
    (fp8 / "config.json").write_text(json.dumps(config))
    found = evaluate(reference, base=fp8, text=text, seqlen=64, limit=2, device="cpu")
    assert found["kl_mean"] < 1e-12
    # The scales matter: without them the two would be far apart.
    assert evaluate(source, base=fp8, text=text, seqlen=64, limit=2, device="cpu")["kl_mean"] > 1e-6


def test_a_dense_copy_with_the_config_of_the_fp8_one_is_what_its_files_say(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path
) -> None:
    source = tiny_checkpoint("llama", dtype=torch.float32)
    copied = tmp_path / "copied"
    shutil.copytree(source, copied)
    config = json.loads((copied / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (copied / "config.json").write_text(json.dumps(config))
    found = evaluate(source, base=copied, text=text, seqlen=64, limit=2, device="cpu")
    assert found["kl_mean"] < 1e-12


# --- generated text


def test_generated_text_is_greedy_whatever_the_checkpoint_asks_for(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    shutil.copytree(tiny_checkpoint("llama", dtype=torch.float32), folder)  # bf16 has ties
    asked = {"do_sample": True, "temperature": 9.0, "repetition_penalty": 5.0, "max_new_tokens": 3}
    (folder / "generation_config.json").write_text(json.dumps(asked))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("The mill", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        for _ in range(12):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    expected = tokenizer.decode(ids[0], skip_special_tokens=True)
    assert generate_text(folder, "The mill", device="cpu", max_new_tokens=12) == expected
    assert expected.startswith("The mill")


def test_an_artifact_generates_too(artifact: tuple[Path, Path]) -> None:
    said = generate_text(artifact[1], "The mill", device="cpu", max_new_tokens=4)
    assert said.startswith("The mill")
    assert len(said) > len("The mill")


def test_a_prompt_beyond_the_positions_is_refused(artifact: tuple[Path, Path]) -> None:
    with pytest.raises(UsageError, match="positions"):
        generate_text(artifact[0], "The mill " * 2000, device="cpu")


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "pad_token_id"])
@pytest.mark.parametrize("value", ["1", {}, math.nan, 1.5, True, 2**63, -(10**30), [1, "2"], [[1]]])
def test_special_tokens_that_are_none_are_refused(
    tiny_checkpoint: Callable[..., Path], artifact: tuple[Path, Path], tmp_path: Path, key: str, value: object
) -> None:
    """By the file that has them, whether a checkpoint's or an artifact's: generation would fail somewhere in torch."""
    for number, source in enumerate((tiny_checkpoint("llama"), artifact[1])):
        for name in ("generation_config.json", "config.json"):
            folder = tmp_path / f"{number}{name}"
            shutil.copytree(source, folder)
            content = json.loads((source / name).read_text()) if (source / name).exists() else {}
            (folder / name).write_text(json.dumps(content | {key: value}))
            with pytest.raises(InputError, match=f"{key} is ") as caught:
                open_model(folder, "cpu")
            assert caught.value.file == str(folder / name)


@pytest.mark.parametrize("value", [None, 0, -1, 5000, [], [1, 2]])
def test_special_tokens_that_models_have_are_read(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, value: object
) -> None:
    shutil.copytree(tiny_checkpoint("llama"), tmp_path / "m")
    (tmp_path / "m/generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert generate_text(tmp_path / "m", "The mill", device="cpu", max_new_tokens=2).startswith("The mill")
