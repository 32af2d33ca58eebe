"""The commands: exit codes and messages, stdout and stderr, and that refused calls write nothing."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import ciuic_cli.compression.pipeline
import ciuic_cli.evaluation.perplexity as evaluating
from ciuic_cli.cli import app as cli
from ciuic_cli.cli.compress import _show_next_steps
from ciuic_cli.cli.console import Console
from ciuic_cli.compression.options import CompressOptions
from ciuic_cli.errors import CiuicError
from ciuic_cli.evaluation import opening
from ciuic_cli.evaluation.opening import expected_bytes
from ciuic_cli.evaluation.perplexity import OWN_TEXT
from ciuic_cli.process.signals import INTERRUPTED

QUICK = ["--nsamples", "4", "--seqlen", "64", "--effort", "fast"]


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def made(
    tiny_checkpoint: Callable[..., Path], text: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, Any]:
    """The original, its artifact, and the result of the command."""
    original = tiny_checkpoint("llama")
    out = tmp_path_factory.mktemp("made") / "out"
    result = invoke(
        "compress", original, out, "--ratio", 3, "--calibration", text, "--calibration-only", *QUICK
    )
    assert result.exit_code == 0, result.stderr
    return original, out, result


# --- wrong usage


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ratio", "0.5"], "--ratio 0.5"),
        (["--ratio", "nan"], "--ratio nan"),
        (["--ratio", "inf"], "--ratio inf"),
        (["--ratio", "four"], "--ratio"),
        (["--ratio", "4", "--target-bpw", "4"], "each set the budget"),
        (["--target-bpw", "0"], "--target-bpw"),
        (["--target-bpw", "17"], "--target-bpw"),
        (["--target-size", "8X"], "is not a size"),
        (["--bits", "2,9"], "--bits"),
        (["--prune", "1"], "--prune"),
        (["--rank", "24"], "use 16"),
        (["--rank", "8"], "use 16"),
        (["--rank", "999999999"], "use 999999984"),
        (["--device", "tpu"], "--device"),
        (["--device", "cuda:x"], "--device"),
        (["--nsamples", "0"], "--nsamples"),
        (["--seqlen", "1"], "--seqlen"),
        (["--seed", "-1"], "--seed"),
        (["--effort", "huge"], "--effort"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_wrong_options_are_usage_errors(tmp_path: Path, options: list[str], message: str) -> None:
    result = invoke("compress", tmp_path, tmp_path / "out", *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == "" and "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments", [["compress"], ["compress", "model"], ["compress", "model", "--dry-run"], ["squeeze"]]
)
def test_incomplete_calls_are_usage_errors(arguments: list[str]) -> None:
    assert invoke(*arguments).exit_code == 2


def test_the_exit_codes_are_documented() -> None:
    words = " ".join(invoke("--help").stdout.split())
    reference = (Path(__file__).parents[2] / "docs" / "REFERENCE.md").read_text(encoding="utf-8")
    codes = {error.exit_code for error in CiuicError.__subclasses__()} | {
        0,
        CiuicError.exit_code,
        INTERRUPTED,
    }
    assert codes == {0, 1, 2, 3, 4, 5, 130}
    for code in codes:
        assert re.search(rf"[:;] {code} [a-z]", words), code
        assert f"\n| {code} | " in reference, code


def test_empty_prompt(made: tuple[Path, Path, Any]) -> None:
    assert invoke("eval", made[1], "--prompt", " ").exit_code == 2


# --- bad input


@pytest.mark.parametrize(
    "command", [["compress", "{}", "{}-out"], ["inspect", "{}"], ["eval", "{}"], ["bench", "{}"]]
)
@pytest.mark.parametrize("json_option", [[], ["--json"]])
def test_missing_folder(tmp_path: Path, command: list[str], json_option: list[str]) -> None:
    folder = tmp_path / "nowhere"
    result = invoke(*[part.format(folder) for part in command], *json_option)
    assert result.exit_code == 3
    assert "no such folder" in result.stderr and str(folder) in result.stderr
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_removed_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    result = invoke("inspect", tmp_path)
    assert result.exit_code == 5 and "the working directory was removed" in result.stderr


def test_pickles_only(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(tiny_checkpoint("llama") / "config.json", model)
    (model / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    result = invoke("compress", model, tmp_path / "out")
    assert result.exit_code == 3
    assert "safetensors" in result.stderr and "Traceback" not in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_unknown_architecture(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("llama"), model)
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "perceptron9", "architectures": ["Perceptron9ForCausalLM"]}
    (model / "config.json").write_text(json.dumps(config))
    result = invoke("compress", model, tmp_path / "out")
    assert result.exit_code == 3
    assert "perceptron9" in result.stderr.lower()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
def test_unreachable_ratio(tiny_checkpoint: Callable[..., Path], tmp_path: Path, dry_run: list[str]) -> None:
    out = tmp_path / "out"
    result = invoke("compress", tiny_checkpoint("llama"), out, "--ratio", 900, *dry_run)
    assert result.exit_code == 4
    assert "cannot be reached" in result.stderr and "--ratio" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_existing_output_is_left_alone(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    result = invoke("compress", tiny_checkpoint("llama"), out)
    assert result.exit_code == 3
    assert "exists already" in result.stderr and "move this one away" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [("mine.txt", "mine")]


def test_unreadable_calibration(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    result = invoke(
        "compress", tiny_checkpoint("llama"), tmp_path / "out", "--calibration", tmp_path / "none.txt"
    )
    assert result.exit_code == 3
    assert "none.txt" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_missing_gpu(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = invoke("compress", tiny_checkpoint("llama"), tmp_path / "out", "--device", "cuda:0")
    assert result.exit_code == 5
    assert list(tmp_path.iterdir()) == []


# --- compress


def test_compress_prints_the_report(made: tuple[Path, Path, Any]) -> None:
    original, out, result = made
    report = json.loads((out / "memory_report.json").read_text())
    assert report["artifact_bytes"] == sum(file.stat().st_size for file in out.glob("*.safetensors"))
    for figure in (f"{report['ratio']:.3f}", f"{report['bits_per_weight']:.3f}", f"{report['predicted_kl']:.3g}",
                   f"{report['measured_kl']:.3g}", "embedding", "down", "prune:", "lowrank:", "bits:"):  # fmt: skip
        assert figure in result.stdout
    assert f"next: ciuic eval {out} --base {original} --text FILE\n" in result.stderr
    assert "<!DOCTYPE html>" in (out / "memory_report.html").read_text(encoding="utf-8")


def test_dry_run_prints_one_object_and_writes_nothing(
    tiny_checkpoint: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = ["--ratio", 3, "--calibration", text, "--calibration-only", *QUICK, "--dry-run", "--json"]
    result = invoke("compress", tiny_checkpoint("llama"), out, *arguments)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["ratio"] >= 3 and report["measured_kl"] is None
    assert list(tmp_path.iterdir()) == []


def test_profile_prints_the_account(tiny_checkpoint: Callable[..., Path], text: Path, tmp_path: Path) -> None:
    arguments = ["--ratio", 3, "--calibration", text, "--calibration-only", *QUICK, "--profile"]
    original = tiny_checkpoint("llama")
    result = invoke("compress", original, tmp_path / "out", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)["profile"]
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    assert phases == ["forward", "moments", "head", "backward", "embedding", "arms", "plan", "probe", "encode",
                      "measure", "write"]  # fmt: skip
    moments = {row["kind"]: row for row in rows if row["phase"] == "moments"}
    assert set(moments) == {"q", "k", "v", "o", "gate", "up", "down"}
    del moments["up"]  # it shares H with gate, and the products of a diagonal are not counted
    assert all(row["operations"] > 0 and row["bytes"] > 0 for row in moments.values())
    searches = [row for row in rows if row["step"] == "search"]
    assert all(row["seconds"] > 0 and row["share"] is None for row in searches)
    assert {row["kind"] for row in searches} >= {"down", "embedding"}
    shown = invoke("compress", original, tmp_path / "plan", *arguments, "--dry-run").stdout
    assert re.search(r"moments +│ rest +│ down", shown)
    assert re.search(r"^ *all +│", shown, re.MULTILINE)


def test_options_reach_the_pipeline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def fake(model: Path, out: Path, **options: Any) -> dict[str, Any]:
        print("a library that chats on stdout")
        seen.update(options, model=model, out=out)
        raise KeyboardInterrupt

    monkeypatch.setattr(ciuic_cli.compression.pipeline, "compress", fake)
    model = tmp_path / "model"
    model.mkdir()
    result = invoke(
        "compress", model, tmp_path, "--target-size", "1MiB", "--calibration", "a.txt", "--calibration", "b.txt",
        "--nsamples", 7, "--seqlen", 99, "--seed", 5, "--effort", "best", "--prune", "0.1", "--rank", "32",
        "--bits", "4,3", "--device", "cpu", "--calibration-only", "--dry-run", "--force", "--json",
    )  # fmt: skip
    assert result.exit_code == 130
    assert result.stdout == "" and "interrupted" in result.stderr and "chats" in result.stderr
    expected = {
        "model": model, "out": tmp_path, "target_size": 2**20, "calibration": (Path("a.txt"), Path("b.txt")),
        "nsamples": 7, "seqlen": 99, "seed": 5, "effort": "best", "prune": 0.1, "rank": 32, "bits": (3, 4),
        "calibration_only": True, "device": "cpu", "dry_run": True, "force": True,
    }  # fmt: skip
    assert {key: seen[key] for key in expected} == expected
    assert seen["ratio"] is None and seen["target_bpw"] is None


def test_an_unexpected_exception_is_a_bug(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fake(*arguments: Any, **options: Any) -> None:
        raise ZeroDivisionError("surprise")

    monkeypatch.setattr(ciuic_cli.compression.pipeline, "compress", fake)
    result = invoke("compress", tmp_path, tmp_path / "out")
    assert result.exit_code == 1
    assert "a bug in ciuic" in result.stderr and "surprise" in result.stderr


# --- inspect, eval, bench


def test_inspect_artifact_and_original(made: tuple[Path, Path, Any]) -> None:
    original, out, _ = made
    for folder, kind in ((original, "checkpoint"), (out, "artifact")):
        result = invoke("inspect", folder, "--tensors")
        assert result.exit_code == 0, result.stderr
        assert kind in result.stdout and "lm_head" in result.stdout
        found = json.loads(invoke("inspect", folder, "--json").stdout)
        assert found["kind"] == kind and "rows" not in found
        assert f"{found['parameters']:,} parameters" in result.stdout
    assert "rows" in json.loads(invoke("inspect", out, "--tensors", "--json").stdout)


def test_verify_names_the_damaged_file(made: tuple[Path, Path, Any], tmp_path: Path) -> None:
    _, out, _ = made
    intact = invoke("inspect", out, "--verify")
    assert intact.exit_code == 0 and "intact" in intact.stdout
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-100] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    damaged = invoke("inspect", copy, "--verify")
    assert damaged.exit_code == 3
    assert "model.safetensors" in damaged.stderr and "model.safetensors" in damaged.stdout
    as_json = invoke("inspect", copy, "--verify", "--json")
    assert as_json.exit_code == 3
    assert json.loads(as_json.stdout)["verification"]["problems"][0][0] == "model.safetensors"


def test_verify_of_a_plain_checkpoint(made: tuple[Path, Path, Any]) -> None:
    result = invoke("inspect", made[0], "--verify")
    assert result.exit_code == 3 and "no checksums" in result.stderr


def test_eval_against_the_original(made: tuple[Path, Path, Any], text: Path) -> None:
    original, out, _ = made
    arguments = [
        "eval",
        out,
        "--base",
        original,
        "--text",
        text,
        "--seqlen",
        64,
        "--limit",
        2,
        "--prompt",
        "The mill",
    ]
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    keys = (
        "perplexity",
        "stderr",
        "tokens",
        "kl_mean",
        "kl_median",
        "kl_p99",
        "top1_agreement",
        "perplexity_ratio",
    )
    assert all(isinstance(found[key], (int, float)) for key in keys)
    assert found["kl_mean"] > 0 and found["tokens"] == 2 * 63
    assert found["text_before"].startswith("The mill") and found["text_after"].startswith("The mill")


def test_eval_of_an_original_that_cannot_be_loaded(
    made: tuple[Path, Path, Any], text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is measured layer by layer, and no text is generated."""
    original, out, _ = made
    room = 2 * expected_bytes(out, None)
    for module in (opening, evaluating):
        monkeypatch.setattr(module, "free_memory", lambda place: room)
    options = ["--base", original, "--text", text, "--seqlen", 64, "--limit", 2, "--prompt", "The mill"]
    result = invoke("eval", out, *options, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["kl_mean"] > 0 and found["text_after"].startswith("The mill")
    assert "text_before" not in found
    said = " ".join(result.stderr.split())
    assert "layer by layer" in said and "no text of the original: the weights take" in said


@pytest.mark.parametrize("files", [(), (Path("mine.txt"),)])
def test_the_next_command_suggests_a_text_after_calibration_with_the_users_own(
    files: tuple[Path, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    _show_next_steps(Console(), "model", Path("out"), CompressOptions(calibration=files))
    shown = capsys.readouterr().err
    assert "ciuic eval out --base model" in shown and ("--text FILE" in shown) == bool(files)


@pytest.mark.parametrize("own", [True, False])
def test_eval_says_which_text_it_used(made: tuple[Path, Path, Any], text: Path, own: bool) -> None:
    chosen = [] if own else ["--text", text]
    result = invoke("eval", made[1], *chosen, "--seqlen", 64, "--limit", 1)
    assert result.exit_code == 0, result.stderr
    assert (OWN_TEXT if own else str(text)) in result.stdout
    assert ("--text FILE measures on yours" in result.stderr) == own


def test_eval_of_the_original_with_itself(made: tuple[Path, Path, Any], text: Path) -> None:
    original, _, _ = made
    result = invoke("eval", original, "--base", original, "--text", text, "--seqlen", 64, "--limit", 1)
    assert result.exit_code == 0, result.stderr
    assert "100.00 %" in result.stdout and "1.0000" in result.stdout


@pytest.mark.parametrize("json_option", [[], ["--json"]])
def test_bench(made: tuple[Path, Path, Any], monkeypatch: pytest.MonkeyPatch, json_option: list[str]) -> None:
    figures = {
        "weight_bytes": 1_000_000, "rss_bytes": 2_000_000, "peak_rss_bytes": 3_000_000, "load_seconds": 1.25,
        "prefill": {"mean": 512.25, "stdev": 3.5}, "decode": {"mean": 41.5, "stdev": 0.5},
    }  # fmt: skip
    seen: dict[str, Any] = {}

    def fake(path: Path, **options: Any) -> dict[str, Any]:
        seen.update(options, path=path)
        options["progress"]("models", 1, 1)
        return {
            "model": figures,
            "base": {**figures, "weight_bytes": 4_000_000},
            "ratios": {"weight_bytes": 4.0},
        }

    monkeypatch.setattr("ciuic_cli.evaluation.bench.bench", fake)
    original, out, _ = made
    result = invoke(
        "bench", out, "--base", original, "-p", 32, "-n", 4, "-r", 2, "--batch-size", 3, *json_option
    )
    assert result.exit_code == 0, result.stderr
    assert (seen["path"], seen["base"]) == (out, original)
    keys = ("prompt_tokens", "new_tokens", "repetitions", "batch_size")
    assert [seen[key] for key in keys] == [32, 4, 2, 3]
    if json_option:
        assert json.loads(result.stdout)["ratios"] == {"weight_bytes": 4.0}
    else:
        for figure in ("4 MB", "1 MB", "4.00", "512.2 ± 3.5", "41.5 ± 0.5"):
            assert figure in result.stdout
