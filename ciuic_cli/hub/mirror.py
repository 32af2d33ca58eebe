"""A model on the hub as a folder of which only a part is on disk: weights are fetched when they are read.

The safetensors files are sparse. `reading_from` fetches the missing blocks of a range before it is read. Blocks that
were read longest ago are dropped again (a hole is punched into the file) when more than the limit would be there. A run
reads the weights several times, so it fetches more than the model has: that is the price of the small disk.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ciuic_cli.errors import EnvironmentFault, InputError, UsageError
from ciuic_cli.hub.download import hub_faults, wanted_files
from ciuic_cli.hub.headers import fetch_headers

BLOCK_BYTES = 8 << 20
"""Bytes that are fetched and dropped together; whole pages, which a file system can free. Chosen, not tuned."""
_REQUEST_BLOCKS = 8
"""Blocks of one request; bounds the memory of a fetch. Chosen, not tuned."""
_PUNCH_HOLE = 3
"""Linux' FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE."""
_Block = tuple[Path, int]
_mirrors: dict[Path, Mirror] = {}
"""The mirrors that are open, by their real folders."""


@contextmanager
def mirrored(name: str, revision: str | None, max_disk: int) -> Iterator[Path]:
    """A temporary folder with a hub model's files, of which at most `max_disk` bytes of weights are on disk at a time.

    Raises InputError as `download`; UsageError if `max_disk` is less than the largest tensor needs.
    """
    with tempfile.TemporaryDirectory(prefix="ciuic-") as scratch:
        # Named as in the hub's cache, so that the model's name is found where it is looked for.
        folder = Path(scratch).resolve() / f"models--{name.replace('/', '--')}" / "snapshots" / "partial"
        folder.mkdir(parents=True)
        with hub_faults(name):
            info = fetch_headers(name, revision, folder, only_describing=False)
            files = [file for file in wanted_files(name, info) if file.endswith(".safetensors")]
        _mirrors[folder] = Mirror(folder, name, str(info.sha), files, max_disk)
        try:
            yield folder
        finally:
            del _mirrors[folder]


@contextmanager
def reading_from(file: Path, begin: int, end: int) -> Iterator[None]:
    """Inside the block, the bytes [begin, end) of a file are on disk. Does nothing for files outside of mirrors."""
    mirror = _mirror_of(file) if _mirrors else None
    if mirror is None:
        yield
        return
    with mirror.lock:
        mirror.fetch(file, begin, end)
        yield


def commit_of(file: Path) -> str | None:
    """The commit of a file in a mirror, which stands for its content; None for other files."""
    mirror = _mirror_of(file) if _mirrors else None
    return None if mirror is None else mirror.commit


def _mirror_of(file: Path) -> Mirror | None:
    return next((mirror for folder, mirror in _mirrors.items() if folder in file.parents), None)


class Mirror:
    """The state of a mirror.

    Attributes:
        lock: held while blocks are fetched or read, so that no block is dropped that is being read.
        present: blocks on disk with their bytes, the one that was read longest ago first.
        commit: of the model.
    """

    def __init__(self, folder: Path, name: str, commit: str, files: list[str], limit: int) -> None:
        self.folder, self.name, self.commit, self.limit = folder, name, commit, limit
        self.lock = threading.RLock()
        self.present: OrderedDict[_Block, int] = OrderedDict()
        self.size = {folder / file: (folder / file).stat().st_size for file in files}
        self.data_begin: dict[Path, int] = {}
        for file in self.size:
            with file.open("rb") as opened:
                self.data_begin[file] = 8 + int.from_bytes(opened.read(8), "little")

    def fetch(self, file: Path, begin: int, end: int) -> None:
        """Fetch the blocks of a range that are missing, and drop others if there are too many."""
        if file not in self.size or begin >= end:
            return
        wanted = [(file, number) for number in range(begin // BLOCK_BYTES, (end - 1) // BLOCK_BYTES + 1)]
        needed = sum(self._nbytes(block) for block in wanted)
        if needed > self.limit:
            raise UsageError(
                f"--max-disk {self.limit}: a tensor needs {needed} bytes on disk",
                file=f"{self.name}/{file.name}",
                remedy=f"allow at least {needed + BLOCK_BYTES} bytes",
            )
        for block in wanted:
            if block in self.present:
                self.present.move_to_end(block)
        missing = [block for block in wanted if block not in self.present]
        self._make_room(sum(self._nbytes(block) for block in missing), set(wanted))
        for at in range(0, len(missing), _REQUEST_BLOCKS):
            for run in _runs(missing[at : at + _REQUEST_BLOCKS]):
                self._request(run)

    def _span(self, block: _Block) -> tuple[int, int]:
        """First byte of a block in its file, and the byte behind it. The header belongs to no block."""
        file, number = block
        begin = number * BLOCK_BYTES
        return max(begin, self.data_begin[file]), min(begin + BLOCK_BYTES, self.size[file])

    def _nbytes(self, block: _Block) -> int:
        begin, end = self._span(block)
        return end - begin

    def _make_room(self, nbytes: int, keep: set[_Block]) -> None:
        total = sum(self.present.values()) + nbytes
        for block in [block for block in self.present if block not in keep]:
            if total <= self.limit:
                return
            begin, end = self._span(block)
            _punch(block[0], begin, end)
            total -= self.present.pop(block)

    def _request(self, run: list[_Block]) -> None:
        """Fetch consecutive blocks of a file by one request."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

        file = run[0][0]
        begin, end = self._span(run[0])[0], self._span(run[-1])[1]
        url = hf_hub_url(self.name, file.relative_to(self.folder).as_posix(), revision=self.commit)
        with hub_faults(self.name):
            headers = {**build_hf_headers(), "range": f"bytes={begin}-{end - 1}"}
            response = http_backoff("GET", url, headers=headers)
            hf_raise_for_status(response)
        if response.status_code != 206 or len(response.content) != end - begin:
            raise InputError(
                f"the hub sent {len(response.content)} bytes of the {end - begin} that were asked for",
                file=f"{self.name}/{file.name}",
                remedy="try again, or leave --max-disk out",
            )
        with file.open("r+b") as opened:
            opened.seek(begin)
            opened.write(response.content)
        for block in run:
            self.present[block] = self._nbytes(block)


def _runs(blocks: list[_Block]) -> list[list[_Block]]:
    """The blocks of a file in groups of consecutive ones."""
    runs: list[list[_Block]] = []
    for block in blocks:
        if runs and runs[-1][-1][1] + 1 == block[1]:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs


def _punch(file: Path, begin: int, end: int) -> None:
    """Give the disk space of a range back. Raises EnvironmentFault if the file system cannot."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)
    with file.open("r+b") as opened:
        if fallocate(opened.fileno(), _PUNCH_HOLE, begin, end - begin) != 0:
            raise EnvironmentFault(
                f"the file system cannot free a part of a file: {os.strerror(ctypes.get_errno())}",
                file=file,
                remedy="set TMPDIR to a folder on ext4, xfs, btrfs or tmpfs, or leave --max-disk out",
            )
