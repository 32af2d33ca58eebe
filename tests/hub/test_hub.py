"""The round trip through the hub against a stand-in that counts bytes: inspect, compress, push, load."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_stand_in import SHA, Hub, serving
from huggingface_hub import ModelCard, constants
from typer.testing import CliRunner

import ciuic_cli
from ciuic_cli.artifact.layout import StoredTensor, lay_out
from ciuic_cli.artifact.uploading import push
from ciuic_cli.artifact.verification import verify
from ciuic_cli.checkpoint.folder import locate
from ciuic_cli.cli.app import app
from ciuic_cli.errors import EnvironmentFault, InputError, UsageError
from ciuic_cli.hub import mirror
from ciuic_cli.hub.download import hub_id, with_revision

TINY, LARGE, SMALL = "org/tiny", "org/large", "org/small"
CARD = "---\nlicense: mit\n---\n# Tiny\n"
EXTRA = {
    "README.md": CARD, "qwen.tiktoken": "IQ== 0\n", "LICENSE.md": "MIT", "model.py": "raise SystemExit",
    "pytorch_model.bin": "pickle", "consolidated.safetensors": "x" * 5000, "original/model.safetensors": "y" * 5000,
    "original/params.json": "{}", "onnx/model.onnx": "z", "additional_chat_templates/rag.jinja": "{{ messages }}",
}  # fmt: skip
"""Files of the repository besides what transformers writes."""


@pytest.fixture(scope="module")
def hub(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """The stand-in with a tiny model of several shards."""
    patch = pytest.MonkeyPatch()
    folder = tmp_path_factory.mktemp("hub") / "tiny"
    shutil.copytree(tiny_checkpoint("llama", max_shard_size="60KB"), folder)
    for name, text in EXTRA.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    with serving() as state:
        state.models[TINY] = {"main": folder, "old": folder}
        patch.setattr(constants, "ENDPOINT", state.address)
        template = state.address + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setenv("HF_TOKEN", "hf_stand_in")
        yield state
    patch.undo()


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def large(hub: Hub, tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> int:
    """Parameters of a Llama of 2 GB on the hub, in three shards that take no space on disk."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("large")
    config = AutoConfig.from_pretrained(
        tiny_checkpoint("llama"), hidden_size=2048, intermediate_size=5632, num_hidden_layers=20, vocab_size=32000,
        num_attention_heads=32, num_key_value_heads=8, head_dim=64,
    )  # fmt: skip
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tensors = [
        StoredTensor(name, "BF16", tuple(tensor.shape), 2 * tensor.numel())
        for name, tensor in model.state_dict().items()
    ]
    shards = lay_out(tensors, shard_bytes=800_000_000)
    for shard in shards:
        with (folder / shard.file).open("wb") as file:
            file.write(shard.header)
            file.truncate(shard.nbytes)
    weight_map = {tensor.name: shard.file for shard in shards for tensor in shard.tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    hub.models[LARGE] = {"main": folder}
    assert len(shards) == 3 and sum(shard.nbytes for shard in shards) > 2_000_000_000
    return sum(tensor.numel() for tensor in model.state_dict().values())


def test_inspect_reads_the_headers_only(hub: Hub, large: int) -> None:
    found = invoke("inspect", LARGE, "--json")
    assert found.exit_code == 0, found.stderr
    described = json.loads(found.stdout)
    assert described["parameters"] == large and described["path"] == LARGE
    assert described["file_bytes"] > 2 * large and described["files"] == 3
    read = sum(count for (name, _), count in hub.sent.items() if name == LARGE)
    assert 0 < read < 2_000_000, read


def test_a_revision(hub: Hub) -> None:
    found = invoke("inspect", TINY, "--revision", "old", "--json")
    assert found.exit_code == 0, found.stderr
    assert json.loads(found.stdout)["path"] == f"{TINY}@old"
    absent = invoke("inspect", TINY, "--revision", "absent")
    assert absent.exit_code == 3 and "no such revision" in absent.stderr
    assert invoke("inspect", ".", "--revision", "old").exit_code == 2
    assert hub_id("org/name@refs/pr/1") == ("org/name", "refs/pr/1") and hub_id("name") is None
    with pytest.raises(UsageError, match="does not fit"):
        with_revision("org/name@a", "b")


def test_an_unknown_model(hub: Hub) -> None:
    found = invoke("inspect", "org/absent")
    assert found.exit_code == 3 and "hub has no model of this name" in found.stderr


@pytest.fixture(scope="module")
def compressed(hub: Hub, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compressed") / "out"
    hub.reads.clear()
    ciuic_cli.compress(
        TINY, out, ratio=3.0, calibration=[text], nsamples=4, seqlen=64, effort="fast", prompt="The river"
    )
    return out


def test_compress_reads_each_shard_once_and_no_second_copy(hub: Hub, compressed: Path) -> None:
    reads = {file: count for (name, file), count in hub.reads.items() if name == TINY}
    shards = [file for file in reads if re.fullmatch(r"model-\d+-of-\d+\.safetensors", file)]
    assert len(shards) > 2 and all(reads[file] == 1 for file in shards), reads
    unwanted = {"model.py", "pytorch_model.bin", "consolidated.safetensors"}
    assert not unwanted & reads.keys() and not any(file.startswith(("original", "onnx")) for file in reads)
    assert {"qwen.tiktoken", "LICENSE.md", "additional_chat_templates/rag.jinja"} <= reads.keys()
    assert {"qwen.tiktoken", "LICENSE.md", "tokenizer.json"} <= {file.name for file in compressed.iterdir()}
    card = ModelCard((compressed / "README.md").read_text()).data.to_dict()
    assert card["base_model"] == TINY and card["license"] == "mit"
    before = hub.reads.total()
    assert locate(TINY) == locate(f"{TINY}@main") and hub.reads.total() == before, "the cache is used"


def test_a_part_of_the_model_on_disk_gives_the_same_weights(
    hub: Hub, compressed: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 4 KiB, and a disk for a quarter of the weights."""
    monkeypatch.setattr(mirror, "BLOCK_BYTES", 4096)
    weights = sum(file.stat().st_size for file in hub.models[TINY]["main"].glob("model-*.safetensors"))
    limit, seen = weights // 4, []
    request = mirror.Mirror._request

    def observed(self: mirror.Mirror, run: list[tuple[Path, int]]) -> None:
        request(self, run)
        os.sync()
        allocated = sum(512 * file.stat().st_blocks for file in self.folder.glob("*.safetensors"))
        seen.append((sum(self.present.values()), allocated))

    monkeypatch.setattr(mirror.Mirror, "_request", observed)
    hub.sent.clear()
    ciuic_cli.compress(
        TINY, tmp_path / "out", ratio=3.0, calibration=[text], nsamples=4, seqlen=64, effort="fast", max_disk=limit
    )  # fmt: skip
    ours, theirs = (
        json.loads((out / "memory_report.json").read_text()) for out in (tmp_path / "out", compressed)
    )
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        compressed / "model.safetensors"
    ).read_bytes()
    assert ours["model"] == theirs["model"] == TINY
    assert max(count for count, _ in seen) <= limit
    spare = 3 * 4 * 4096  # each of the three files has its header, and pages that header and data share
    assert max(allocated for _, allocated in seen) <= limit + spare < weights
    read = sum(count for (_, file), count in hub.sent.items() if file.startswith("model-"))
    assert read > weights, "the weights are read several times"


def test_limits_of_the_disk(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a tensor needs"):
        ciuic_cli.compress(TINY, tmp_path / "out", max_disk=1000)
    with pytest.raises(UsageError, match="for a model on the hub"):
        ciuic_cli.compress(locate(TINY), tmp_path / "out", max_disk=10**9)
    assert list(tmp_path.iterdir()) == []


def test_the_report_names_the_model_and_shows_a_sample(compressed: Path) -> None:
    report = json.loads((compressed / "memory_report.json").read_text())
    assert report["model"] == TINY and re.fullmatch(r"\d{4}-\d\d-\d\d", report["date"])
    (sample,) = report["samples"]
    assert sample["prompt"] == "The river"
    assert all(sample[key].startswith("The river") and len(sample[key]) > 20 for key in ("before", "after"))
    page = (compressed / "memory_report.html").read_text()
    assert f"<h1>{TINY}, compressed 3.0" in page and "Before and after" in page


def test_what_was_downloaded_works_offline(
    hub: Hub, compressed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = locate(TINY)
    requests = len(hub.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert locate(TINY) == folder and len(hub.requests) == requests
    with pytest.raises(InputError, match="cannot be reached"):
        locate("org/never-seen")


@pytest.fixture(scope="module")
def pushed(hub: Hub, compressed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the hub has after `ciuic push`."""
    found = invoke("push", compressed, SMALL, "--private")
    assert found.exit_code == 0, found.stderr
    assert found.stdout.strip() == f"{hub.address}/{SMALL}/commit/{SHA}"
    folder = tmp_path_factory.mktemp("pushed")
    for name, content in hub.pushed[SMALL].items():
        (folder / name).write_bytes(content)
    hub.models[SMALL] = {"main": folder}
    return folder


def test_push_uploads_every_file(hub: Hub, compressed: Path, pushed: Path) -> None:
    assert hub.created[-1]["name"] == "small" and hub.created[-1]["visibility"] == "private"
    ours = {file.name: file.read_bytes() for file in compressed.iterdir()}
    theirs = {file.name: file.read_bytes() for file in pushed.iterdir()}
    assert ours.keys() == theirs.keys()
    assert {name for name in ours if ours[name] != theirs[name]} == {"README.md", "ciuic_checksums.json"}
    assert verify(pushed).problems == () and verify(pushed).unlisted == ()


def test_the_example_of_the_pushed_card_works(pushed: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (pushed / "README.md").read_text(), re.DOTALL)
    assert SMALL in code and "path/to" not in code
    names: dict[str, Any] = {}
    exec(code, names)  # downloads from the stand-in
    ids = names["tokenizer"]("The river", return_tensors="pt")["input_ids"]
    assert names["model"](input_ids=ids).logits.isfinite().all()
    assert "CompressedLinear" in {type(module).__name__ for module in names["model"].modules()}


def test_an_artifact_on_the_hub_is_described_as_its_folder(hub: Hub, compressed: Path, pushed: Path) -> None:
    from ciuic_cli.report.hub_inspection import describe_hub
    from ciuic_cli.report.inspection import describe

    before = hub.sent[SMALL, "model.safetensors"]
    found, local = describe_hub(SMALL).as_dict(tensors=True), describe(compressed).as_dict(tensors=True)
    assert (
        hub.sent[SMALL, "model.safetensors"] - before <= 100_001
    )  # huggingface_hub reads so much of every file
    found["path"] = local["path"]
    rows, local_rows = ({row["name"]: row for row in part.pop("rows")} for part in (found, local))
    assert found == local
    assert rows.keys() == local_rows.keys()
    for name, row in rows.items():
        assert row | {"reason": ""} == local_rows[name] | {"reason": ""}


@pytest.mark.parametrize("status", [401, 403, 500])
def test_a_refused_upload(hub: Hub, compressed: Path, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "refuses", status)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    with pytest.raises(EnvironmentFault, match="no token" if status < 500 else "500"):
        push(compressed, "org/refused")


def test_an_upload_without_a_network(compressed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The errors of the hub's HTTP library are no OSErrors."""

    class Unreachable(Exception):
        pass

    def fail(*_: object, **__: object) -> None:
        raise Unreachable("[Errno -2] Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", fail)
    with pytest.raises(EnvironmentFault, match=r"the upload to the hub failed: .*Name or service not known"):
        push(compressed, "org/unreachable")


def test_only_intact_artifacts_are_pushed(hub: Hub, compressed: Path, tmp_path: Path) -> None:
    requests = len(hub.requests)
    with pytest.raises(UsageError, match="no name of a repository"):
        push(compressed, "just-a-name")
    damaged = shutil.copytree(compressed, tmp_path / "damaged")
    (damaged / "recipe.yaml").write_text("ratio: 9")
    with pytest.raises(InputError, match="damaged"):
        push(damaged, SMALL)
    with pytest.raises(InputError, match="not a ciuic artifact"):
        push(locate(TINY), SMALL)
    assert not any("commit" in request for request in hub.requests[requests:])
