"""Downloads a model from the hub: which of its files are fetched, and where they are then.

A hub id is `org/name`, or `org/name@revision` for a branch, tag or commit. Of a repository, only data that this package
or a tokenizer reads is fetched, never code or pickles. The weights are the files that the index names, or the only ones
of the repository's own folder, so that no second copy of them is fetched.
"""

from __future__ import annotations

import fnmatch
import glob
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ciuic_cli.errors import CiuicError, InputError, UsageError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

_HUB_ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
TOKENIZER_ENDINGS = (".model", ".tiktoken", ".spm", ".vocab", ".bpe", ".jinja")
"""Endings of files of tokenizers that have no fixed name: sentencepiece, tiktoken and its kin, chat templates."""
_DATA = (
    "*.json",
    "*.txt",
    *(f"*{ending}" for ending in TOKENIZER_ENDINGS),
    "LICENSE*",
    "NOTICE*",
    "README.md",
)
"""Files in a repository's folder that are fetched besides the weights."""
_TEMPLATES = "additional_chat_templates/*.jinja"
INDEX_NAME, SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"
_SECOND_COPIES = ("consolidated*", "*.fp16.safetensors", "*.fp32.safetensors")
"""Weights in another layout or format beside those that transformers loads."""


def hub_id(path: str) -> tuple[str, str | None] | None:
    """Name and revision (None: the default branch) of `org/name` or `org/name@revision`; None for any other text."""
    match = _HUB_ID.fullmatch(path)
    return None if match is None else (match["name"], match["revision"])


def with_revision(path: str, revision: str | None) -> str:
    """The hub id with this revision, as an option gives it. Raises UsageError if `path` is no plain hub id."""
    if revision is None:
        return path
    found = hub_id(path)
    if found is None or found[1] is not None or hub_id(f"{path}@{revision}") is None or Path(path).is_dir():
        raise UsageError(
            f"--revision {revision!r:.80} does not fit {path!r:.80}",
            remedy="give a hub id such as org/name, and the name of a branch, a tag or a commit",
        )
    return f"{path}@{revision}"


def download(name: str, revision: str | None) -> Path:
    """The folder of a model in the hub's cache; files that are absent there are fetched, each once.

    Without network the cached files are used. Raises InputError if the hub has no such model or cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    with hub_faults(name):
        try:
            info = repository(name, revision)
        except (RepositoryNotFoundError, RevisionNotFoundError):
            raise
        except (
            Exception
        ) as error:  # offline, or of the HTTP library, whose name depends on the hub library's version
            try:
                cached = snapshot_download(
                    name, revision=revision, allow_patterns=["config.json"], local_files_only=True
                )
                return Path(cached)  # whoever opens it finds out whether it is complete
            except LocalEntryNotFoundError:
                raise error from None
        patterns = [glob.escape(file) for file in wanted_files(name, info)]
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))


def repository(name: str, revision: str | None) -> ModelInfo:
    """The commit of a model and its files, with their sizes."""
    from huggingface_hub import HfApi

    return HfApi().model_info(name, revision=revision, files_metadata=True)


def wanted_files(name: str, info: ModelInfo) -> list[str]:
    """The files of the repository that are fetched."""
    from huggingface_hub import hf_hub_download

    present = [file.rfilename for file in info.siblings or ()]
    top = [file for file in present if "/" not in file]
    chosen = {file for file in top if any(fnmatch.fnmatchcase(file, pattern) for pattern in _DATA)}
    chosen |= {file for file in present if fnmatch.fnmatchcase(file, _TEMPLATES)}
    weights = {file for file in top if file.endswith(".safetensors")}
    if INDEX_NAME in top:
        index = Path(hf_hub_download(name, INDEX_NAME, revision=info.sha))
        named = _files_of(index)
        weights = {file for file in present if file in named}
    elif SINGLE_NAME in top:
        weights = {SINGLE_NAME}
    else:
        weights = {file for file in weights if not any(fnmatch.fnmatchcase(file, p) for p in _SECOND_COPIES)}
    return sorted(chosen | weights)


def _files_of(index: Path) -> set[str]:
    """The files that the index names; it is checked when the folder is opened."""
    try:
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return {file for file in named if isinstance(file, str)}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            "the index cannot be read", file=index, remedy="the repository is damaged; choose another one"
        ) from error


@contextmanager
def hub_faults(name: str) -> Iterator[None]:
    """Convert errors of the hub's library in the block to InputErrors that name the model."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        yield
    except RevisionNotFoundError as error:
        raise InputError(
            "the hub has the model, but no such revision",
            file=name,
            remedy="give a branch, a tag or a commit",
        ) from error
    except RepositoryNotFoundError as error:
        raise InputError(
            "no such folder, and the hub has no model of this name (or it is private)",
            file=name,
            remedy="check the name; for a private or gated model run `hf auth login` first",
        ) from error
    except CiuicError:
        raise
    except Exception as error:  # of the hub's library, its HTTP library, the disk
        raise InputError(
            f"no such folder, and {_hub_failure(error)}",
            file=name,
            remedy="check the path and the network, or download the model elsewhere and give its folder",
        ) from error


def _hub_failure(error: Exception) -> str:
    """The reason why a download failed, for a message."""
    response = getattr(error, "response", None)
    if response is not None:
        return f"the hub answers with HTTP status {response.status_code}"
    if isinstance(error, ValueError):
        return "the name is no hub id"
    if isinstance(error, OSError) and error.strerror:
        return f"the download from the hub failed: {error.strerror}"
    return "the hub cannot be reached"
