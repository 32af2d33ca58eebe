"""Files and folders of an artifact are complete or absent, even if writing or publishing fails."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError, safe_open

from ciuic_cli.artifact import publishing, writer
from ciuic_cli.artifact.layout import StoredTensor, lay_out, stored_bytes
from ciuic_cli.errors import EnvironmentFault, InputError
from ciuic_cli.process import atomic_files
from ciuic_cli.process.file_faults import environment_fault

BLOBS = [StoredTensor(f"blob.{number}", "U8", (64,), 64) for number in range(5)]


def _payload(name: str) -> bytes:
    return bytes([int(name.removeprefix("blob."))]) * 64


def _failing(code: int) -> Any:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def _folder(path: Path, **files: str) -> Path:
    path.mkdir()
    for name, text in files.items():
        (path / name).write_text(text)
    return path


def _unfinished(out: Path, **files: str) -> Path:
    """The folder that will be renamed to `out`, with these files."""
    folder = publishing.begin(out)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def _content(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic_files.write_atomically(path, b"first")
    atomic_files.write_atomically(path, b"second")
    assert path.read_bytes() == b"second"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize(
    ("code", "remedy"),
    [(errno.ENOSPC, "free disk space"), (errno.EDQUOT, "quota"), (errno.EIO, "check the disk")],
)
def test_34_a_failing_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, remedy: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    owner = os if call == "fsync" else Path
    with monkeypatch.context() as patch:
        patch.setattr(owner, call, _failing(code))
        with pytest.raises(EnvironmentFault, match=remedy) as caught:
            atomic_files.write_atomically(path, b"new")
    assert caught.value.exit_code == 5
    assert caught.value.file == str(path)
    assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()} == {"file": b"old"}


def test_34_a_read_only_folder(tmp_path: Path) -> None:
    error = environment_fault(OSError(errno.EROFS, os.strerror(errno.EROFS)), tmp_path)
    assert "another output folder" in str(error)
    with pytest.raises(EnvironmentFault, match="No such file"):
        atomic_files.write_atomically(tmp_path / "absent" / "file", b"")


def test_shards_and_their_index(tmp_path: Path) -> None:
    shards = lay_out(BLOBS, shard_bytes=128)
    counted: list[int] = []
    writer.write_shards(shards, tmp_path, _payload, counted.append)
    writer.write_index(shards, tmp_path)
    assert sum(counted) == stored_bytes(shards)
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(weight_map.values())) == 3
    for name, file in weight_map.items():
        with safe_open(tmp_path / file, framework="np") as opened:
            assert opened.get_tensor(name).tobytes() == _payload(name)


def test_one_shard_needs_no_index(tmp_path: Path) -> None:
    writer.write_index(lay_out(BLOBS), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_payload_of_another_size_is_a_bug(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"blob\.0: 3 bytes, 64 were planned"):
        writer.write_shards(lay_out(BLOBS), tmp_path, lambda name: b"abc", lambda nbytes: None)


NEW = {"weights": "new", "config": "new"}
OLD = {"weights": "old", writer.CHECKSUMS: "old"}


@pytest.fixture(params=["renameat2", "two renames"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Publishing with renameat2, and without it as on systems that lack it."""
    if request.param == "two renames":
        monkeypatch.setattr(publishing, "rename_with_flag", lambda first, second, flag: False)
    return str(request.param)


@pytest.mark.parametrize("old", [None, {}, OLD])
def test_37_publishing_gives_the_folder_its_name(
    tmp_path: Path, way: str, old: dict[str, str] | None
) -> None:
    _unfinished(tmp_path / "out", **NEW)
    out = tmp_path / "out"
    if old is not None:
        _folder(out, **old)
    assert publishing.publish(out, force=bool(old)) is None
    assert _content(out) == NEW
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("kind", ["artifact", "folder", "file", "link", "dangling"])
def test_37_publishing_touches_nothing_that_was_not_to_be_replaced(
    tmp_path: Path, way: str, kind: str, force: bool
) -> None:
    new, out = _unfinished(tmp_path / "out", **NEW), tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    elif kind in ("link", "dangling"):
        out.symlink_to(_folder(tmp_path / "other", **OLD) if kind == "link" else "nowhere")
    else:
        _folder(out, **(OLD if kind == "artifact" else {"mine": "mine", "config.json": "{}"}))
    before = out.lstat()
    if force and kind == "artifact":
        publishing.publish(out, force=True)
        assert _content(out) == NEW
        return
    with pytest.raises(EnvironmentFault, match="appeared while the run was working") as caught:
        publishing.publish(out, force=force)
    assert caught.value.file == str(out) and "run the same command again" in str(caught.value.remedy)
    assert (out.lstat().st_ino, out.lstat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert _content(new) == NEW


def test_37_an_old_folder_that_cannot_be_removed_is_named(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _unfinished(tmp_path / "out", **NEW)
    out = _folder(tmp_path / "out", **OLD)
    monkeypatch.setattr(atomic_files.shutil, "rmtree", _failing(errno.EACCES))
    left = publishing.publish(out, force=True)
    assert left == tmp_path / ".out.partial" and _content(out) == NEW
    assert OLD in [_content(folder) for folder in left.iterdir() if folder.is_dir()]
    assert publishing.recover(out) == left
    monkeypatch.undo()
    assert publishing.recover(out) is None and [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_37_an_exchange_is_one_step(tmp_path: Path) -> None:
    """Both names exist all the time; the inodes change places."""
    first, second = _folder(tmp_path / "a", file="a"), _folder(tmp_path / "b", file="b")
    inodes = first.stat().st_ino, second.stat().st_ino
    if atomic_files.rename_with_flag(first, second, atomic_files.EXCHANGE):
        assert (second.stat().st_ino, first.stat().st_ino) == inodes
        assert _content(first) == {"file": "b"}
    else:  # no renameat2 here: nothing may have changed
        assert (first.stat().st_ino, second.stat().st_ino) == inodes


def test_an_exchange_with_an_absent_folder_is_refused(tmp_path: Path) -> None:
    first = _folder(tmp_path / "a", file="a")
    assert atomic_files.rename_with_flag(first, tmp_path / "absent", atomic_files.EXCHANGE) is False
    assert _content(first) == {"file": "a"}


def test_a_system_without_renameat2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic_files.ctypes, "CDLL", lambda *args, **kwargs: object())
    assert atomic_files.rename_with_flag(tmp_path, tmp_path / "other", atomic_files.NOREPLACE) is False


def test_34_publishing_that_fails_leaves_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _unfinished(tmp_path / "out", **NEW)
    out = _folder(tmp_path / "out", **OLD)
    monkeypatch.setattr(publishing, "rename_with_flag", _failing(errno.EACCES))
    with pytest.raises(EnvironmentFault, match="permissions"):
        publishing.publish(out, force=True)
    assert _content(out) == OLD


@pytest.mark.parametrize(
    ("owners", "sticky", "may"),
    [((7, 7), True, False), ((0, 7), True, True), ((7, 0), True, True), ((7, 7), False, True)],
)
def test_37_a_sticky_folder_binds_all_but_the_owners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owners: tuple[int, int], sticky: bool, may: bool
) -> None:
    """owners: of the folder and its parent; 0 is the current user."""
    out = _folder(tmp_path / "out")
    tmp_path.chmod(0o1777 if sticky else 0o777)
    real = Path.stat

    def stat(path: Path, **options: Any) -> Any:
        found = list(real(path, **options))
        found[4] = 1000 + owners[path != out]
        return os.stat_result(found)

    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert atomic_files.may_rename(out) is may


def test_companions_are_data_and_never_code(tmp_path: Path) -> None:
    source = _folder(
        tmp_path / "source", **{"tokenizer.json": "{}", "modeling_x.py": "import os", "generation_config.json": "{}",
                                "model.safetensors": "weights", "pytorch_model.bin": "pickle"}
    )  # fmt: skip
    out = _folder(tmp_path / "out")
    writer.copy_companions(source, out)
    assert sorted(_content(out)) == ["generation_config.json", "tokenizer.json"]


def test_16_a_companion_that_leads_outside_is_not_copied(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    source, out = _folder(tmp_path / "source"), _folder(tmp_path / "out")
    (source / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(InputError, match="outside"):
        writer.copy_companions(source, out)
    assert _content(out) == {}


def test_37_a_companion_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = _folder(tmp_path / "source", **{"generation_config.json": "{}"})
    monkeypatch.setattr(Path, "open", _failing(errno.EACCES))  # file modes do not apply to root
    with pytest.raises(InputError, match="Permission denied") as caught:
        writer.companions(source)
    assert caught.value.file == str(source / "generation_config.json")


def test_26_the_config_names_no_code(tmp_path: Path) -> None:
    source = {"model_type": "llama", "auto_map": {"AutoModel": "evil.py"}, "quantization_config": {"a": 1}}
    writer.write_config(tmp_path, source, {"quant_method": "ciuic"})
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "model_type": "llama",
        "quantization_config": {"quant_method": "ciuic"},
    }


def test_checksums_are_those_of_the_files(tmp_path: Path) -> None:
    _folder(tmp_path / "out", a="first", b="")
    writer.write_checksums(tmp_path / "out")
    document = json.loads((tmp_path / "out" / writer.CHECKSUMS).read_text())
    assert document["algorithm"] == "sha256"
    assert document["files"] == {
        "a": {"sha256": hashlib.sha256(b"first").hexdigest(), "bytes": 5},
        "b": {"sha256": hashlib.sha256(b"").hexdigest(), "bytes": 0},
    }


def test_34_a_fallback_that_fails_half_way_puts_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, out = _unfinished(tmp_path / "out", **NEW), _folder(tmp_path / "out", **OLD)
    monkeypatch.setattr(publishing, "rename_with_flag", lambda first, second, flag: False)
    rename = Path.rename

    def second_fails(self: Path, target: Path) -> Path:
        if self == new:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", second_fails)
    with pytest.raises(EnvironmentFault):
        publishing.publish(out, force=True)
    assert _content(out) == OLD


def test_34_an_interrupted_write_leaves_no_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_args: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "file").write_text("old")
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        atomic_files.write_atomically(tmp_path / "file", b"new")
    assert _content(tmp_path) == {"file": "old"}


def test_34_the_system_error_inside_a_safetensors_error() -> None:
    error = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    fault = environment_fault(error, Path("x"))
    assert "No space left" in fault.message and "free disk space" in (fault.remedy or "")
    assert "odd" in environment_fault(SafetensorError("odd"), Path("x")).message
