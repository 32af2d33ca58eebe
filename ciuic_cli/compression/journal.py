"""The journal: finished steps as files beside the output, so that a killed run continues and ends in the same bytes."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from ciuic_cli.artifact.writer import CHECKSUMS
from ciuic_cli.errors import EnvironmentFault, InputError
from ciuic_cli.process import work_folders
from ciuic_cli.process.atomic_files import remove_path, sync_folder, write_atomically
from ciuic_cli.process.digests import file_digest
from ciuic_cli.process.file_faults import environment_fault

_LOCK = "lock"
"""File that a process locks; it contains the PID."""
_FILES, _FINISHED = "files", "finished"
"""Folders of finished files, and of their steps."""
_FINGERPRINT = "fingerprint.json"
"""File with the inputs and options of the run."""
_KEPT = (work_folders.MARK, _LOCK)
"""Files that stay as long as the folder."""
_PUBLISHED = "published"
"""Step that is saved just before the artifact takes the output's name."""
_SHOWN_CHARACTERS = 40
"""Values with more characters are not shown in a message (chosen, not tuned)."""


class Journal:
    """The work folder of one output. As a context manager it locks the folder for one process at a time.

    Every finished step is a file. It is written under another name, synced and renamed, so a step is either finished or
    absent; a digest detects torn files. Anything in the folder that is neither a regular file nor a folder counts as
    absent: links are not followed, and pipes are not opened.

    Attributes:
        out: the output folder. folder: the work folder beside it.
        ended: name of the work folder while it is being removed.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.folder = work_folders.work_folder(out, work_folders.JOURNAL)
        self.ended = work_folders.work_folder(out, work_folders.ENDED)
        self._lock: int | None = None
        self._created_parents: list[Path] = []

    def __enter__(self) -> Journal:
        while self._lock is None:
            handle = self._open_lock()
            if self._is_current(handle):
                self._lock = handle
            else:  # another run ended and removed the folder after this one opened the file
                os.close(handle)
        try:
            os.truncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            self.__exit__(None, None, None)
            raise environment_fault(error, self.folder) from error
        return self

    def _open_lock(self) -> int:
        lock = self.folder / _LOCK
        try:
            self._created_parents += [parent for parent in self.folder.parents if not parent.exists()]
            work_folders.create(self.folder)
            _clear_unless(stat.S_ISREG, lock)
            handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise EnvironmentFault(
                f"cannot create the work folder: {error.strerror}",
                file=self.folder,
                remedy="check the permissions of the output's parent folder",
            ) from error
        self._acquire(handle, fcntl.LOCK_EX)
        return handle

    def require_free(self) -> None:
        """Raise EnvironmentFault if a run is writing this output now."""
        try:
            handle = os.open(self.folder / _LOCK, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:  # no run has begun; if something else is wrong, `__enter__` reports it
            return
        self._acquire(handle, fcntl.LOCK_SH)
        os.close(handle)

    def _acquire(self, handle: int, mode: int) -> None:
        try:
            fcntl.flock(handle, mode | fcntl.LOCK_NB)
        except OSError as error:
            pid = os.read(handle, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(handle)
            raise EnvironmentFault(
                f"another run (PID {pid}) is writing this output",
                file=self.out,
                remedy="wait until it ends, or choose another output folder",
            ) from error

    def _is_current(self, handle: int) -> bool:
        """Whether the lock file at the journal's path is the one that `handle` has open."""
        try:
            return os.fstat(handle).st_ino == (self.folder / _LOCK).stat().st_ino
        except FileNotFoundError:
            return False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            with suppress(OSError):
                if self._is_current(self._lock) and not self.has_steps():
                    self.remove()
            os.close(self._lock)
            self._lock = None
        for parent in self._created_parents:
            with suppress(OSError):  # folders that are not empty stay
                parent.rmdir()

    def stored_bytes(self) -> int:
        """Bytes of all files in the folder."""
        total = 0
        for folder, _, names in os.walk(self.folder):
            for name in names:
                with suppress(FileNotFoundError):  # another worker may delete it
                    total += Path(folder, name).stat().st_size
        return total

    def has_steps(self) -> bool:
        """Whether a run can continue from here: there is a file besides mark, lock and fingerprint."""
        bookkeeping = [self.folder / name for name in (*_KEPT, _FINGERPRINT)]
        return any(path.is_file() and path not in bookkeeping for path in self.folder.rglob("*"))

    def begin(self, fingerprint: dict[str, Any], *, restart: bool) -> bool:
        """Start a run, or continue the one that left this journal; True if there is one to continue.

        Steps of another run are discarded with `restart`.

        Raises:
            InputError: the journal belongs to a run with other inputs or options, and not `restart`; lists the
            differences.
        """
        path, previous = self.folder / _FINGERPRINT, self.unfinished()
        if previous is not None and previous != fingerprint:
            if not restart:
                raise InputError(
                    "an unfinished run with other inputs or options lies beside this output: "
                    + "; ".join(dict.fromkeys(_differences(previous, fingerprint))),
                    file=self.folder,
                    remedy="repeat the earlier command to finish it, or start again with --force "
                    "(in Python: force=True)",
                )
            previous = None
        if previous is None:
            self.clear()  # these steps belong to another run, or to one without a fingerprint
        else:
            self._tidy()
        write_atomically(path, json.dumps(fingerprint, indent=2, sort_keys=True).encode())
        return previous is not None

    def unfinished(self) -> dict[str, Any] | None:
        """The fingerprint of the run that left this journal; None if there is none."""
        return self._json(self.folder / _FINGERPRINT)

    def clear(self) -> None:
        """Remove everything but the mark and the lock."""
        for path in self.folder.iterdir():
            if path.name not in _KEPT:
                remove_path(path)

    def _tidy(self) -> None:
        """Remove links, pipes, unfinished writes, and torn files at the top level."""
        for parent, folders, files in os.walk(self.folder):
            for name in (*folders, *files):
                path = Path(parent, name)
                mode = path.lstat().st_mode
                # Folders of the journal have no dot in their names.
                is_ours = stat.S_ISREG(mode) or (stat.S_ISDIR(mode) and "." not in name)
                if not is_ours or name.endswith(".part"):
                    remove_path(path)
        for path in self.folder.iterdir():
            if path.is_file() and path.name not in (*_KEPT, _FINGERPRINT) and self.load(path.name) is None:
                path.unlink()

    def remove(self) -> None:
        """Remove the journal after the run. It is renamed first, so that a kill leaves either all of it or none."""
        self.sweep()
        try:
            self.folder.rename(self.ended)
        except OSError:
            with suppress(OSError):
                work_folders.remove(self.folder)
        self.sweep()

    def sweep(self) -> None:
        """Remove what a killed `remove` left. Needs no lock: no run continues from it."""
        with suppress(OSError):
            work_folders.remove(self.ended)

    def save(self, name: str, data: bytes) -> None:
        """Save the result of the step `name`, which finishes it. name: a file name, or folder/file."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        _clear_unless(stat.S_ISREG, path)
        write_atomically(path, _digest(name, data) + data)

    def publishing(self, folder: Path) -> None:
        """Record that the finished artifact in `folder` is about to take the output's name."""
        self.save(_PUBLISHED, (folder / CHECKSUMS).read_bytes())

    def published(self) -> bool:
        """Whether the output is the artifact that `publishing` recorded, so that only the journal is left to remove.

        Compares the lists of checksums only: the other files may have been damaged since.
        """
        announced = self.load(_PUBLISHED)
        try:
            return announced is not None and announced == (self.out / CHECKSUMS).read_bytes()
        except OSError:
            return False

    def seal(self, name: str, folder: Path) -> None:
        """Finish the step `name`, whose result is the files of `folder`, a subfolder of the journal."""
        self.save(name, _digests(folder))

    def sealed(self, name: str, folder: Path, may_lack: Callable[[str], bool] = lambda file: False) -> bool:
        """Whether the step `name` is finished and the files of `folder` are unchanged since.

        may_lack: whether the file of this name may be absent, because it was deleted when it had served its purpose.
        """
        stored = self.load(name)
        if stored is None:
            return False
        found = json.loads(_digests(folder))
        expected = json.loads(stored)
        return found == {
            file: value for file, value in expected.items() if file in found or not may_lack(file)
        }

    def has(self, name: str) -> bool:
        """Whether the step `name` has a result, without reading it: a torn one counts. `load` detects it."""
        return (self.folder / name).is_file()

    def load(self, name: str) -> bytes | None:
        """The result of a finished step; None if it is absent or torn."""
        stored = _bytes(self.folder / name)
        if stored is None:
            return None
        digest, data = stored[:32], stored[32:]
        return data if _digest(name, data) == digest else None

    @staticmethod
    def _json(path: Path) -> dict[str, Any] | None:
        try:
            value = json.loads(_bytes(path) or b"")
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None


class FinishedFiles:
    """The safetensors files of a run that are finished, in its journal; the artifact's folder gets links to them.

    A finished file has the codes of its matrices, so their steps can be emptied (`Run.release_codes`): a run takes the
    disk space of its codes once. A run that continues takes finished files as they are. Each has a step, whose result
    is the file's SHA-256.

    Attributes:
        folder: where the files are written.
    """

    def __init__(self, journal: Journal) -> None:
        self.folder = journal.folder / _FILES
        self.folder.mkdir(exist_ok=True)
        self._journal = journal

    def has(self, file: str) -> bool:
        """True if the file is finished, by its name alone: its bytes are not read."""
        return self._journal.has(_step_of(file)) and (self.folder / file).is_file()

    def add(self, file: str) -> None:
        """Record that the file is finished and synced."""
        sync_folder(self.folder)
        self._journal.save(_step_of(file), file_digest(self.folder / file).encode())

    def link(self, file: str, folder: Path) -> None:
        """Give the file a second name in another folder; a file system without hard links gets a copy."""
        try:
            os.link(self.folder / file, folder / file)
        except OSError:
            shutil.copyfile(self.folder / file, folder / file)

    @staticmethod
    def are_intact(journal: Journal, earlier: str) -> bool:
        """True if all finished files still have the bytes that were recorded. Reads all of them.

        earlier: a step that is made from the codes before the first file. If it is damaged while there are files, this
        returns False, too: it cannot be made again, because codes may be in the files only.
        """
        steps = sorted((journal.folder / _FINISHED).glob("*"))
        if steps and journal.load(earlier) is None:
            return False
        for step in steps:
            digest = journal.load(_step_of(step.name))
            found = None
            with suppress(FileNotFoundError):
                found = file_digest(journal.folder / _FILES / step.name)
            if digest is None or found != digest.decode():
                return False
        return True


def _step_of(file: str) -> str:
    return f"{_FINISHED}/{file}"


def _digest(name: str, data: bytes) -> bytes:
    """SHA-256 of a step's name and result: detects a torn file, and a file under another step's name."""
    return hashlib.sha256(name.encode() + b"\0" + data).digest()


def _bytes(path: Path) -> bytes | None:
    """The content of a regular file; None if there is none."""
    try:
        return path.read_bytes() if stat.S_ISREG(path.lstat().st_mode) else None
    except (FileNotFoundError, NotADirectoryError):
        return None


def _clear_unless(kind: Callable[[int], bool], path: Path) -> None:
    """Remove anything at `path` that is not of this kind; kind: a test of the file mode, such as stat.S_ISREG."""
    with suppress(FileNotFoundError):
        if not kind(path.lstat().st_mode):
            remove_path(path)


def _digests(folder: Path) -> bytes:
    digests = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_file():
            digests[path.name] = file_digest(path)
    return json.dumps(digests).encode()


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The changed keys, with both values if they are short; at most five from each nested dict."""
    differences = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            differences += _differences(before, after)[:5]
            continue
        shown = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in (before, after)]
        if shown[0] == shown[1]:  # floats that differ only beyond the fourth digit
            shown = [str(before), str(after)]
        if max(map(len, shown)) > _SHOWN_CHARACTERS:
            differences.append(f"{key} changed")
        else:
            differences.append(f"{key}: {shown[0]} before, {shown[1]} now")
    return differences
