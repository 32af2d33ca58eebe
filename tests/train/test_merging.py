"""Merging an adapter: as low-rank parts, coded again, and as a dense bfloat16 checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ciuic_cli
from ciuic_cli.artifact import tensors
from ciuic_cli.artifact.reader import open_artifact
from ciuic_cli.artifact.tensors import read_tensor
from ciuic_cli.artifact.verification import verify
from ciuic_cli.checkpoint.model_map import map_model
from ciuic_cli.compression.journal import Journal
from ciuic_cli.errors import InputError, UsageError
from ciuic_cli.recipes import RECIPE
from ciuic_cli.train.examples import Example
from ciuic_cli.train.merging import merge as merging
from ciuic_cli.train.merging.changes import changes_of
from ciuic_cli.train.merging.low_rank_parts import write_low_rank
from ciuic_cli.train.merging.merge import MergeReport, merge
from ciuic_cli.train.merging.merged_checkpoint import merged_checkpoint
from ciuic_cli.train.merging.unmeasured import Unmeasured
from ciuic_cli.train.options import TrainOptions

peft = pytest.importorskip("peft")

LINEARS = r".*\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj|gate_proj|up_proj|down_proj)"
STACKS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.fixture(scope="module")
def adapter(artifact: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of an artifact with low-rank parts and sorted rows, and of an adapter of rank 4."""
    folder = artifact("deepseek_v3", prune=False, rank=16).folder
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, task_type="CAUSAL_LM", target_modules=LINEARS, target_parameters=STACKS,
        use_rslora=True, rank_pattern={"o_proj": 2},
    )  # fmt: skip
    model = peft.get_peft_model(ciuic_cli.load(folder, device="cpu", dtype=torch.float32), config)
    experts = model.config.n_routed_experts
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter.data, std=0.1)
        if "lora_B" in name and "experts" in name:
            parameter.data.view(len(parameter), -1, experts)[:, :, 2] = (
                0  # as if no token had chosen expert 2
            )
    out = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(out)
    return folder, out


def adapted(folder: Path, adapter: Path) -> Any:
    return peft.PeftModel.from_pretrained(
        ciuic_cli.load(folder, device="cpu", dtype=torch.float32), adapter
    ).eval()


def merged_weights(folder: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """Every compressed parameter plus what the adapter adds."""
    model_map = map_model(merged_checkpoint(folder, changes_of(adapted(folder, adapter))))
    return {name: model_map.read(name) for name, one in model_map.parameters.items() if one.compress}


def examples(count: int = 16) -> list[Example]:
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(97, 122, (40,), generator=generator).tolist() for _ in range(count)]
    return [Example(ids, ids) for ids in texts]


def test_low_rank_parts_give_the_adapters_model(adapter: tuple[Path, Path], tmp_path: Path) -> None:
    folder, saved = adapter
    report = merge(folder, saved, tmp_path / "out", "low-rank", examples(), device="cpu")
    changed = 0
    for name, expected in merged_weights(folder, saved).items():
        before, after = read_tensor(folder, name), read_tensor(tmp_path / "out", name)
        change = (expected - before).norm()
        changed += bool(change > 1e-3)
        assert (after - expected).norm() <= 0.02 * change + 1e-5, name
    assert changed > 10
    assert report.kl_merged < 0.3 * report.kl_base and report.kl_base > 1e-3
    assert (
        report.bytes_before
        < report.bytes_after
        == sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    )
    assert verify(tmp_path / "out").problems == ()
    with open_artifact(tmp_path / "out").blobs["model.layers.1.mlp.experts.down_proj"].matrices() as experts:
        assert [expert.header.rank for expert in experts][:4] == [4, 4, 0, 4]


def test_a_change_without_room_is_refused(adapter: tuple[Path, Path], tmp_path: Path) -> None:
    folder, saved = adapter
    changes = changes_of(adapted(folder, saved))
    name = "model.layers.0.self_attn.o_proj.weight"
    part = changes[name][None]
    wide = type(part)(part.left.repeat(1, 40), part.right.repeat(40, 1))
    with pytest.raises(UsageError, match="no room"):
        write_low_rank(folder, {name: {None: wide}}, tmp_path)
    with pytest.raises(UsageError, match="does not have"):
        write_low_rank(folder, {"model.absent.weight": {None: part}}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_merged_checkpoint_reads_decoded_weights_plus_the_change(
    artifact: Callable[..., Any], adapter: tuple[Path, Path]
) -> None:
    folder, saved = adapter
    built = artifact("deepseek_v3", prune=False, rank=16)
    changes = changes_of(adapted(folder, saved))
    model_map = map_model(merged_checkpoint(folder, changes))
    touched = 0
    for name, parameter in model_map.parameters.items():
        if parameter.compress:
            expected = built.decoded[name].clone()
            for expert, change in changes.get(name, {}).items():
                touched += 1
                target = expected if expert is None else expected[expert]
                target += change.left @ change.right
            found = model_map.read(name)
            assert torch.allclose(found, expected, atol=2e-5), name
            if found.dim() == 2:
                assert torch.allclose(model_map.read_rows(name, 3, 21), expected[3:21], atol=2e-5), name
    assert touched > 10


def test_coded_again_in_the_same_bytes(adapter: tuple[Path, Path], tmp_path: Path) -> None:
    folder, saved = adapter
    report = merge(folder, saved, tmp_path / "out", "requantize", examples(), nsamples=2, device="cpu")
    assert report.bytes_after <= report.bytes_before
    assert report.kl_merged < report.kl_base
    assert verify(tmp_path / "out").problems == ()
    # No recipe: `ciuic compress` cannot make this model from a folder, and the files of its text are gone.
    assert not (tmp_path / "out" / RECIPE).exists()


@pytest.mark.parametrize("method", ["low-rank", "bf16", "requantize"])
def test_a_merge_that_ends_before_its_measurement_only_measures_then(
    adapter: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def run() -> MergeReport:
        return merge(folder, saved, out, method, examples(), nsamples=2, device="cpu", hint=hints.append)

    def killed(*arguments: Any) -> MergeReport:
        raise KeyboardInterrupt

    (folder, saved), out, hints = adapter, tmp_path / "out", []
    with monkeypatch.context() as patched:
        patched.setattr(merging, "_measured", killed)
        patched.setattr(Journal, "remove", lambda journal: None)  # and before its steps were removed
        with pytest.raises(KeyboardInterrupt):
            run()
    assert Journal(out).folder.exists() == (method == "requantize")
    before = {file: file.stat().st_mtime_ns for file in out.iterdir()}
    hints.clear()
    report = run()
    assert report.kl_merged < report.kl_base and "only its KL is missing" in hints[0]
    assert before == {file: file.stat().st_mtime_ns for file in out.iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(InputError, match="exists already"):  # it is finished now
        run()


def test_the_texts_of_a_killed_merge_end_with_the_next_one(
    adapter: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*arguments: Any, calibration: list[Path], **options: Any) -> None:
        assert [file.parent.parent for file in calibration] == [tmp_path] * 2
        assert min(len(file.read_text()) for file in calibration) > 500
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(merging, "compress", killed)
        patched.setattr(merging, "remove_path", lambda path: None)  # as after SIGKILL
        with pytest.raises(KeyboardInterrupt):
            merge(*adapter, tmp_path / "out", "requantize", examples(), nsamples=2, device="cpu")
    assert [path.name for path in tmp_path.iterdir()] == [".out.merge-texts"]
    merge(*adapter, tmp_path / "out", "low-rank", examples(), device="cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_merge_that_fails_leaves_nothing(
    adapter: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any) -> None:
        raise UsageError("it does not fit")

    monkeypatch.setattr(merging, "write_low_rank", fails)
    with pytest.raises(UsageError, match="does not fit"):
        merge(*adapter, tmp_path / "out", "low-rank", examples(), device="cpu")
    assert list(tmp_path.iterdir()) == []


def test_a_killed_merge_of_another_method_is_not_continued(
    adapter: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, saved = adapter
    Unmeasured(tmp_path / "out", "low-rank", folder, saved).begin()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        merge(folder, saved, tmp_path / "out", "bf16", examples(), device="cpu")
    assert (tmp_path / "out" / "notes").read_text() == "mine"


def test_pruned_experts_are_not_coded_again(artifact: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match="pruned experts"):
        merged_checkpoint(artifact("deepseek_v3").folder, {})


@pytest.mark.parametrize("piece", [16 * 64, 1 << 20])  # weights: parts of a matrix, or whole matrices
def test_a_dense_bfloat16_model_under_the_hubs_names(
    adapter: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    folder, saved = adapter
    monkeypatch.setattr(tensors, "_PIECE_WEIGHTS", piece)
    report = merge(folder, saved, tmp_path / "out", "bf16", examples(), device="cpu")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert not any("gate_up_proj" in name for name in stored)
    expected = merged_weights(folder, saved)
    for name, value in expected.items():
        if value.dim() == 2:
            assert torch.equal(stored[name], value.bfloat16()), name
    gate_up = expected["model.layers.1.mlp.experts.gate_up_proj"][2]
    parts = [stored[f"model.layers.1.mlp.experts.2.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(torch.cat(parts), gate_up.bfloat16())
    assert report.kl_merged < 0.3 * report.kl_base


def test_pruned_experts_stay_excluded_in_a_dense_model(
    artifact: Callable[..., Any], adapter: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, (_, saved) = artifact("deepseek_v3").folder, adapter
    report = merge(folder, saved, tmp_path / "out", "bf16", examples(), device="cpu")
    assert report.kl_merged < 0.3 * report.kl_base


def test_wrong_arguments_are_refused(adapter: tuple[Path, Path], tmp_path: Path) -> None:
    folder, saved = adapter
    with pytest.raises(UsageError, match="unknown"):
        merge(folder, saved, tmp_path / "out", "magic", examples())
    with pytest.raises(InputError, match="no adapter"):
        merge(folder, tmp_path, tmp_path / "out", "bf16", examples())
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(InputError, match="the output exists"):
        merge(folder, saved, tmp_path / "taken", "bf16", examples())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["taken"]


def test_a_finished_adapter_is_recognised_by_its_options(tmp_path: Path) -> None:
    from ciuic_cli.train.engine import REPORT, finished_report

    chosen = TrainOptions(train_file=tmp_path / "data.jsonl", lora_r=4)
    assert finished_report(tmp_path, chosen) is None
    options = {**chosen.to_dict(), "model": "folder"}
    (tmp_path / REPORT).write_text(json.dumps({"steps": 3, "options": options}))
    assert finished_report(tmp_path, chosen) == {"steps": 3}
    assert finished_report(tmp_path, replace(chosen, max_memory=10**9)) == {"steps": 3}
    assert finished_report(tmp_path, replace(chosen, lora_r=8)) is None
