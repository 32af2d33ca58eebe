"""Faults 14 to 17 and 25: which files of a folder may be opened, its shards and index, and hub ids."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors.torch import save_file

from ciuic_cli.checkpoint.folder import checked_file, locate, read_config, read_json
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.checkpoint.shards import INDEX_NAME, shard_names
from ciuic_cli.errors import EnvironmentFault, InputError


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


def weights(path: Path, *names: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.full((2, 2), float(index)) for index, name in enumerate(names)}, path)


def refusal(folder: Path) -> InputError:
    with pytest.raises(InputError) as caught:
        open_checkpoint(folder)
    assert caught.value.exit_code == 3 and caught.value.remedy
    return caught.value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path / "model"


def test_single_file_and_index(folder: Path) -> None:
    weights(folder / "any-name.safetensors", "w")
    assert set(open_checkpoint(folder).tensors) == {"w"}
    weights(folder / "second.safetensors", "v")
    write_index(folder, {"w": "any-name.safetensors", "v": "second.safetensors"})
    checkpoint = open_checkpoint(folder)
    assert set(checkpoint.tensors) == {"v", "w"} and len(checkpoint.files()) == 2
    assert checkpoint.source_bytes == sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def test_14_several_shards_without_an_index(folder: Path) -> None:
    weights(folder / "a.safetensors", "w")
    weights(folder / "b.safetensors", "v")
    error = refusal(folder)
    assert "2 safetensors files" in error.message and INDEX_NAME in (error.remedy or "")


def test_14_one_shard_of_several(folder: Path) -> None:
    weights(folder / "model-00001-of-00003.safetensors", "w")
    assert "part 1 of 3" in refusal(folder).message


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "..\\x.safetensors"]
)
def test_15_names_that_lead_outside_are_never_opened(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights(folder.parent / "x.safetensors", "w")
    write_index(folder, {"w": name})
    opened: list[str] = []
    real_open = os.open

    def spy(path: str, *rest: int, **named: int) -> int:
        opened.append(os.fspath(path))
        return real_open(path, *rest, **named)

    monkeypatch.setattr(os, "open", spy)
    error = refusal(folder)
    assert error.tensor == "w" and "outside" in error.message
    assert not any("x.safetensors" in path for path in opened)


@pytest.mark.parametrize("value", [3, None, "pytorch_model.bin", ["a.safetensors"]])
def test_an_index_must_name_safetensors(folder: Path, value: object) -> None:
    write_index(folder, {"w": value})
    assert "not a safetensors file" in refusal(folder).message


def test_an_index_needs_a_weight_map(folder: Path) -> None:
    (folder / INDEX_NAME).write_text("{}")
    assert "weight_map" in refusal(folder).message


def test_16_a_symlink_that_leaves_the_folder(folder: Path) -> None:
    weights(folder.parent / "elsewhere.safetensors", "w")
    (folder / "model.safetensors").symlink_to(folder.parent / "elsewhere.safetensors")
    error = refusal(folder)
    assert "symbolic link" in error.message and Path(error.file or "").name == "model.safetensors"


def test_16_an_index_or_config_symlink_that_leaves_the_folder(folder: Path) -> None:
    weights(folder / "model.safetensors", "w")
    (folder / "config.json").unlink()
    (folder.parent / "secret.json").write_text('{"model_type": "llama"}')
    (folder / "config.json").symlink_to("../secret.json")
    assert "symbolic link" in refusal(folder).message


def test_16_a_symlinked_subfolder_is_refused_too(folder: Path) -> None:
    weights(folder.parent / "other" / "x.safetensors", "w")
    (folder / "sub").symlink_to(folder.parent / "other")
    write_index(folder, {"w": "sub/x.safetensors"})
    assert "symbolic link" in refusal(folder).message


def test_16_symlinks_of_the_hub_cache_work(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    weights(repository / "blobs" / "0123", "w")
    (repository / "blobs" / "4567").write_text('{"model_type": "llama"}')
    snapshot = repository / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    (snapshot / "config.json").symlink_to("../../blobs/4567")
    assert set(open_checkpoint(snapshot).tensors) == {"w"}
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../../secret")
    (tmp_path / "secret").write_text("{}")
    with pytest.raises(InputError, match="symbolic link"):
        read_config(snapshot)


def test_a_symlink_to_the_folder_itself_is_fine(folder: Path) -> None:
    weights(folder / "model.safetensors", "w")
    (folder.parent / "link").symlink_to(folder)
    assert set(open_checkpoint(folder.parent / "link").tensors) == {"w"}


def test_17_all_absent_shards_are_listed(folder: Path) -> None:
    weights(folder / "b.safetensors", "v")
    write_index(folder, {"u": "a.safetensors", "v": "b.safetensors", "w": "c.safetensors"})
    error = refusal(folder)
    assert "2 shard(s)" in error.message and "a.safetensors, c.safetensors" in error.message


def test_25_only_pickles(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cposix\nsystem\n")
    error = refusal(folder)
    assert "pickle" in error.message and "save_pretrained" in (error.remedy or "")


def test_a_folder_without_weights_or_with_gguf(folder: Path) -> None:
    assert "no safetensors" in refusal(folder).message
    (folder / "m.gguf").write_bytes(b"GGUF")
    assert "GGUF" in refusal(folder).message


def test_missing_folder_file_instead_of_folder_and_missing_config(tmp_path: Path) -> None:
    assert "no such folder" in refusal(tmp_path / "none").message
    weights(tmp_path / "m.safetensors", "w")
    assert "is a file" in refusal(tmp_path / "m.safetensors").message
    assert "no config.json" in refusal(tmp_path).message


def test_a_folder_without_read_permission_is_an_environment_fault(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, *rest, **named: False)
    with pytest.raises(EnvironmentFault, match="permission") as caught:
        locate(folder)
    assert caught.value.file == str(folder)


@pytest.mark.parametrize("text", ["", "[1]", "{", "\ufeff{}", "[" * 100_000])
def test_a_config_that_is_no_json_object(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    assert (refusal(folder).file or "").endswith("config.json")


def test_json_over_its_limit_is_not_read(folder: Path) -> None:
    with (folder / "big.json").open("wb") as file:
        file.truncate(1 << 34)
    with pytest.raises(InputError, match="at most"):
        read_json(folder, "big.json")


def test_checked_file_refuses_directories_and_pipes(folder: Path) -> None:
    (folder / "sub").mkdir()
    os.mkfifo(folder / "pipe")
    for name in ("sub", "pipe"):
        with pytest.raises(InputError, match="not a regular file"):
            checked_file(folder, name)
    with pytest.raises(InputError, match="cannot open"):
        checked_file(folder, "none")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LocalEntryNotFoundError("no network"), "the hub cannot be reached"),
        (HfHubHTTPError("oops", response=SimpleNamespace(status_code=503, headers={}, request=None)),
         "the hub answers with HTTP status 503"),
        (HFValidationError("a--b"), "the name is no hub id"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
    ],
)  # fmt: skip
def test_a_failed_download_gives_a_clear_message(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(name: str, **options: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    with pytest.raises(InputError, match=message) as caught:
        locate("some-org/some-model")
    assert caught.value.file == "some-org/some-model" and "network" in (caught.value.remedy or "")
    assert type(error).__name__ not in str(caught.value)


@pytest.mark.parametrize("name", ["nowhere", "./org/name", "a/b/c", "/abs/name", "org/"])
def test_what_is_no_hub_id_is_never_looked_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*_: object, **__: object) -> str:
        raise AssertionError("looked up")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    with pytest.raises(InputError, match="no such folder"):
        locate(name)


def test_shard_names_without_index(folder: Path) -> None:
    weights(folder / "model.safetensors", "w")
    assert shard_names(folder) == (["model.safetensors"], None)
