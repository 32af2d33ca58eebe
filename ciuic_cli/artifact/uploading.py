"""`ciuic push`: uploads an artifact to the Hugging Face hub as one commit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from ciuic_cli.artifact.reader import open_artifact
from ciuic_cli.artifact.verification import verify
from ciuic_cli.artifact.writer import CHECKSUMS, encode_checksums
from ciuic_cli.checkpoint.folder import read_json
from ciuic_cli.errors import EnvironmentFault, UsageError
from ciuic_cli.hub.download import hub_id

CARD = "README.md"
CARD_FOLDER = "path/to/this/folder"
"""Where the model card's example has the folder; in a pushed card it is the name on the hub."""


def push(
    path: str | Path,
    name: str,
    *,
    private: bool = False,
    revision: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> str:
    """Upload the files of an artifact to the hub; the repository is made if it does not exist.

    The files are compared with their checksums before. The example in the model card gets the name on the hub.

    Args:
        path: the artifact's folder.
        name: of the repository, org/name.
        private: whether a new repository is private.
        revision: branch; it is made if it does not exist. Default: the main branch.
        progress: of the comparison, called as progress(done, total) in bytes.

    Returns:
        The address of the commit.

    Raises:
        UsageError: `name` is no hub id.
        InputError: no artifact, or a damaged one.
        EnvironmentFault: the hub refuses, or cannot be reached.
    """
    found = hub_id(name)
    if found is None or found[1] is not None:
        raise UsageError(f"{name!r:.100} is no name of a repository", remedy="give it as org/name")
    folder = open_artifact(Path(path)).folder
    verify(folder, progress).require_intact(folder)
    from huggingface_hub import CommitOperationAdd, HfApi

    files: dict[str, Path | bytes] = {file.name: file for file in sorted(folder.iterdir()) if file.is_file()}
    files |= _card_for(folder, name)
    operations = [CommitOperationAdd(file, content) for file, content in files.items()]
    api = HfApi()
    try:
        api.create_repo(name, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(name, branch=revision, exist_ok=True)
        commit = api.create_commit(
            name, operations, commit_message="Upload an artifact of ciuic", revision=revision
        )
    except Exception as error:  # of the hub's library, its HTTP library, the disk
        raise _refusal(error, name) from error
    return str(commit.commit_url)


def _card_for(folder: Path, name: str) -> dict[str, bytes]:
    """The model card whose example loads `name`, and the list of checksums that fits it."""
    if not (folder / CARD).is_file():
        return {}
    card = (folder / CARD).read_text(encoding="utf-8").replace(CARD_FOLDER, name).encode()
    checksums = read_json(folder, CHECKSUMS)
    checksums["files"][CARD] = {"sha256": hashlib.sha256(card).hexdigest(), "bytes": len(card)}
    return {CARD: card, CHECKSUMS: encode_checksums(checksums)}


def _refusal(error: Exception, name: str) -> EnvironmentFault:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403) or type(error).__name__ == "LocalTokenNotFoundError":
        return EnvironmentFault(
            "the hub does not accept the upload: no token, or one that may not write there",
            file=name,
            remedy="run `hf auth login` with a token that may write, and check the name",
        )
    reason = f"HTTP status {status}" if status else " ".join(str(error).split())
    return EnvironmentFault(
        f"the upload to the hub failed: {reason:.300}", file=name, remedy="check the network and try again"
    )
