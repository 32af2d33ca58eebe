"""The journal beside an output: what is finished, so that a killed run goes on and ends in the same bytes."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from ciuic_cli.artifact.writer import CHECKSUMS
from ciuic_cli.errors import EnvironmentFault, InputError
from ciuic_cli.process.atomic_files import clear_away, environment_fault, write_atomically
from ciuic_cli.process.digests import file_digest

_LOCK = "lock"
_FINGERPRINT = "fingerprint.json"
_PUBLISHED = "published"
_SHORT = 40
"""Characters of a value that a message shows."""


class Journal:
    """The work folder of one output, locked for one process at a time (a context manager).

    Finished steps are files: each is written under another name, synced and renamed, so that a step is
    either done or not there; a digest guards against a torn one. What is no regular file or folder as they are
    written here counts as not there: links are not followed, pipes not waited for.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.folder = out.parent / f".{out.name}.ciuic"
        self.ended = out.parent / f".{out.name}.ciuic.ended"
        """The folder's name while it is removed."""
        self._lock: int | None = None
        self._made: list[Path] = []

    def __enter__(self) -> Journal:
        while self._lock is None:
            handle = self._open_lock()
            if self._is_current(handle):
                self._lock = handle
            else:  # another run ended and removed the folder in between
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
            _clear_unless(stat.S_ISDIR, self.folder)
            self._made += [place for place in self.folder.parents if not place.exists()]
            self.folder.mkdir(parents=True, exist_ok=True)
            _clear_unless(stat.S_ISREG, lock)
            handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise EnvironmentFault(
                f"cannot make the work folder: {error.strerror}",
                file=self.folder,
                remedy="check the permissions of the output's parent folder",
            ) from error
        self._hold(handle, fcntl.LOCK_EX)
        return handle

    def require_free(self) -> None:
        """Raise EnvironmentFault if a run is writing this output now."""
        try:
            handle = os.open(self.folder / _LOCK, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:  # none has begun, or `__enter__` will say what is wrong
            return
        self._hold(handle, fcntl.LOCK_SH)
        os.close(handle)

    def _hold(self, handle: int, kind: int) -> None:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except OSError as error:
            pid = os.read(handle, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(handle)
            raise EnvironmentFault(
                f"another run (PID {pid}) is writing this output",
                file=self.out,
                remedy="wait until it ends, or choose another output folder",
            ) from error

    def _is_current(self, handle: int) -> bool:
        """Whether the locked file is still the one that others would find."""
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
        for place in self._made:
            with suppress(OSError):  # what is not empty stays
                place.rmdir()

    def has_steps(self) -> bool:
        """Whether there is something to go on from: any file besides the lock and the fingerprint."""
        own = [self.folder / _LOCK, self.folder / _FINGERPRINT]
        return any(path.is_file() and path not in own for path in self.folder.rglob("*"))

    def begin(self, fingerprint: dict[str, Any], *, restart: bool) -> bool:
        """Compare with the run that left this journal; True if there is one to go on from.

        Raises:
            InputError: the journal belongs to other inputs or options; the differences are listed.
        """
        path = self.folder / _FINGERPRINT
        found = self._json(path)
        if found is not None and found != fingerprint:
            if not restart:
                raise InputError(
                    "an unfinished run with other inputs or options lies beside this output: "
                    + "; ".join(_differences(found, fingerprint)),
                    file=self.folder,
                    remedy="repeat the earlier command to finish it, or start afresh with --force "
                    "(in Python: force=True)",
                )
            found = None
        if found is None:
            self.clear()  # whatever lies here is of another run, or of one that cannot be told
        else:
            self._tidy()
        write_atomically(path, json.dumps(fingerprint, indent=2, sort_keys=True).encode())
        return found is not None

    def clear(self) -> None:
        """Forget all steps; the lock stays."""
        for path in self.folder.iterdir():
            if path.name != _LOCK:
                clear_away(path)

    def _tidy(self) -> None:
        """Remove what no finished step has left: links, pipes, unfinished writes, torn files beside the folders."""
        for place, folders, files in os.walk(self.folder):
            for name in (*folders, *files):
                path = Path(place, name)
                mode = path.lstat().st_mode
                ours = stat.S_ISREG(mode) or (
                    stat.S_ISDIR(mode) and "." not in name
                )  # no folder of ours has a dot
                if not ours or name.endswith(".part"):
                    clear_away(path)
        for path in self.folder.iterdir():
            if path.is_file() and path.name not in (_LOCK, _FINGERPRINT) and self.load(path.name) is None:
                path.unlink()

    def remove(self) -> None:
        """The run is over: nothing of it stays. It loses its name first: a kill leaves all of the journal or none."""
        self.sweep()
        try:
            self.folder.rename(self.ended)
        except OSError:
            with suppress(OSError):
                clear_away(self.folder)
        self.sweep()

    def sweep(self) -> None:
        """Remove what a run left that was killed in `remove`. Needs no lock: nobody goes on from there."""
        with suppress(OSError):
            clear_away(self.ended)

    def save(self, name: str, data: bytes) -> None:
        """Finish the step `name` with its result."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        _clear_unless(stat.S_ISREG, path)
        write_atomically(path, _digest(name, data) + data)

    def publishing(self, folder: Path) -> None:
        """Note that the finished `folder` is about to take the output's name."""
        self.save(_PUBLISHED, (folder / CHECKSUMS).read_bytes())

    def published(self) -> bool:
        """Whether the output is the one that `publishing` announced: only this journal's removal was left to do.

        Its files may have been damaged since.
        """
        announced = self.load(_PUBLISHED)
        try:
            return announced is not None and announced == (self.out / CHECKSUMS).read_bytes()
        except OSError:
            return False

    def seal(self, name: str, folder: Path) -> None:
        """Finish the step `name` whose result are the files of `folder`, a folder inside this one."""
        self.save(name, _digests(folder))

    def sealed(self, name: str, folder: Path) -> bool:
        """Whether the step `name` was finished and its files still have the bytes that they had then."""
        stored = self.load(name)
        return stored is not None and stored == _digests(folder)

    def load(self, name: str) -> bytes | None:
        """The result of a finished step; None if it is not there or torn."""
        stored = _bytes(self.folder / name)
        if stored is None:
            return None
        digest, data = stored[:32], stored[32:]
        return data if _digest(name, data) == digest else None

    @staticmethod
    def _json(path: Path) -> dict[str, Any] | None:
        try:
            found = json.loads(_bytes(path) or b"")
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None


def _digest(name: str, data: bytes) -> bytes:
    """32 bytes by which a step is known to be whole, and to be that step and no other."""
    return hashlib.sha256(name.encode() + b"\0" + data).digest()


def _bytes(path: Path) -> bytes | None:
    """What a regular file has; None if there is none."""
    try:
        return path.read_bytes() if stat.S_ISREG(path.lstat().st_mode) else None
    except (FileNotFoundError, NotADirectoryError):
        return None


def _clear_unless(kind: Callable[[int], bool], path: Path) -> None:
    """Remove what is at `path` if it is not of this kind."""
    with suppress(FileNotFoundError):
        if not kind(path.lstat().st_mode):
            clear_away(path)


def _digests(folder: Path) -> bytes:
    found = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_file():
            found[path.name] = file_digest(path)
    return json.dumps(found).encode()


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What changed, with both values where they are short enough to say something; five of one kind are enough."""
    found = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            found += _differences(before, after)[:5]
        elif max(len(str(before)), len(str(after))) > _SHORT:
            found.append(f"{key} changed")
        else:
            found.append(f"{key}: {before} before, {after} now")
    return found
