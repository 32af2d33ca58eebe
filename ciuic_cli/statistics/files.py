"""The statistics of a model on disk, one file per matrix or stack: written by the sweeps, read by all that follows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ciuic_cli.checkpoint.formats import count_nonfinite
from ciuic_cli.errors import InputError
from ciuic_cli.layerwise.activation_store import has_digest
from ciuic_cli.layerwise.linear_hooks import Key
from ciuic_cli.process.digests import file_digest
from ciuic_cli.process.workers import Workers
from ciuic_cli.statistics.experts import DIAGONAL_TOKENS, with_diagonal
from ciuic_cli.statistics.moments import Moments

INDEX = "statistics.json"
MOMENTS = "moments"
EMBEDDING, ENERGY, FREQUENCY, CONTEXTS = SINGLE = ("embedding_moment", "energy", "frequency", "contexts")
"""Kinds of files with a single tensor, of its kind's name."""


@dataclass(frozen=True)
class EmbeddingUse:
    """How the input embedding matters: the Fisher information of its rows.

    A row's error is the same wherever its token stands in a sequence, so gradients are added up there before they are
    squared. moment: (n, n) float32, Σ s sᵀ of those sums s, with unit trace; energy: (vocabulary,) float32, what one
    occurrence of each token adds to Σ |s|²; frequency: (vocabulary,) float32, the expected share of each token as the
    model itself predicts it (smooth: no token has none).
    """

    moment: torch.Tensor
    energy: torch.Tensor
    frequency: torch.Tensor


class Statistics:
    """Reads what `collect_statistics` wrote into `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = json.loads((folder / INDEX).read_text())
        self.total_tokens: int = index["tokens"]
        self._files: dict[str, dict[str, str]] = index["files"]
        self._tokens: dict[str, dict[str, int]] = index["expert_tokens"]

    def _read(self, name: str, part: str, expert: int | None) -> torch.Tensor | None:
        if name not in self._files[MOMENTS]:
            return None
        key = f"{name}|{part}" if expert is None else f"{name}|{expert}|{part}"
        with safe_open(self.folder / self._files[MOMENTS][name], framework="pt") as file:
            return file.get_tensor(key) if key in file.keys() else None  # noqa: SIM118 (not a dict)

    def covers(self, name: str) -> bool:
        """Whether anything was recorded for the matrix or its layer's pool of experts.

        Nothing is where no gradient passes: an indexer's choice of tokens has none.
        """
        return any(name in self._files[kind] for kind in (MOMENTS, EMBEDDING))

    def tokens(self, name: str, expert: int | None = None) -> int:
        """Calibration tokens that reached the matrix."""
        if expert is None:
            return self.total_tokens
        return self._tokens.get(name, {}).get(str(expert), 0)

    def input_moment(self, name: str, expert: int | None = None) -> torch.Tensor | None:
        """H (n, n), unit trace; None when nothing was recorded."""
        return self._shrunk(name, "inputs", expert)

    def output_fisher(self, name: str, expert: int | None = None) -> torch.Tensor | None:
        """G (m, m) or its diagonal (m,), per token of the text (not per token of the expert)."""
        return self._shrunk(name, "outputs", expert)

    def contexts(self, name: str) -> torch.Tensor | None:
        """Of a head's rows: (vocabulary, n) v with Σ p(1-p) x xᵀ / Σ p(1-p) |x|² ≈ rest + v vᵀ, p the row's own
        probability; None of other matrices.

        v vᵀ is that of the mean input where the row's token is in question, held back as if one more context had
        been seen that says nothing.
        """
        return self._single(CONTEXTS, name) if name in self._files[CONTEXTS] else None

    def embedding_use(self, name: str) -> EmbeddingUse | None:
        if name not in self._files[EMBEDDING]:
            return None
        return EmbeddingUse(*(self._single(kind, name) for kind in (EMBEDDING, ENERGY, FREQUENCY)))

    def _single(self, kind: str, name: str) -> torch.Tensor:
        return load_file(self.folder / self._files[kind][name])[kind]

    def _shrunk(self, name: str, part: str, expert: int | None) -> torch.Tensor | None:
        """One matrix's moment; an expert's is shrunk towards the pool of its layer by token count.

        The weight of the pool is that of as many tokens as the moment has dimensions (a diagonal: of
        DIAGONAL_TOKENS), so that an expert without tokens has the pool's (scaled to one token in the text, hence
        nearly free to change).
        """
        own = self._read(name, part, expert)
        if expert is None:
            return own
        pool = self._read(name, part, None)
        if pool is None:
            return own
        tokens = self.tokens(name, expert)
        if own is not None and own.dim() < pool.dim():
            mixed = self._mixed(name, part, tokens, own, pool.diagonal(), DIAGONAL_TOKENS)
            return with_diagonal(pool, mixed)
        return self._mixed(name, part, tokens, own, pool, pool.shape[0])

    def _mixed(
        self, name: str, part: str, tokens: int, own: torch.Tensor | None, pool: torch.Tensor, strength: int
    ) -> torch.Tensor:
        """An expert's own moment (or its diagonal) and its layer's, which counts for `strength` tokens."""
        if part == "inputs":
            return pool if own is None else (tokens * own + strength * pool) / (tokens + strength)
        everyone = max(1, sum(self._tokens[name].values()))
        per_routed = pool * (self.total_tokens / everyone)  # pool of one routed token
        mine = torch.zeros_like(pool) if own is None else own * self.total_tokens  # sum over my tokens
        mixed = (mine + strength * per_routed) / (tokens + strength)  # per routed token
        return mixed * max(tokens, 1) / self.total_tokens


class StatisticsWriter:
    """Writes each matrix's moments, normalised, to a file of its own; nothing is held twice in memory.

    tokens: of the whole text. source: the checkpoint's folder, for messages.
    """

    def __init__(self, folder: Path, tokens: int, source: Path) -> None:
        self.folder, self.tokens, self.source = folder, tokens, source
        self.files: dict[str, dict[str, str]] = {kind: {} for kind in (MOMENTS, *SINGLE)}
        self.expert_tokens: dict[str, dict[str, int]] = {}
        self.digests: dict[str, str] = {}

    def write(self, moments: Mapping[Key, Moments]) -> None:
        """Moments of matrices, or of experts of a stack; they are divided in place."""
        by_name: dict[str, dict[int | None, Moments]] = {}
        for (name, expert), found in moments.items():
            by_name.setdefault(name, {})[expert] = found
        for name, members in by_name.items():
            self._write_members(name, members)

    def _write_members(self, name: str, members: dict[int | None, Moments]) -> None:
        experts = [
            (e, found) for e, found in sorted(members.items(), key=lambda m: m[0] or 0) if e is not None
        ]
        if experts:
            self.expert_tokens[name] = {str(expert): found.tokens for expert, found in experts}
        if None not in members:
            members[None] = _pool([found for _, found in experts])
        tensors = {}
        for expert, found in members.items():
            label = name if expert is None else f"{name}|{expert}"
            tensors[f"{label}|inputs"] = found.inputs.div_(max(found.energy, 1e-30))
            tensors[f"{label}|outputs"] = found.outputs.mul_(found.scale / self.tokens)
        self._save(MOMENTS, name, f"{name}.safetensors", tensors)

    def write_single(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        """One tensor of a matrix, of a kind in SINGLE."""
        self._save(kind, name, f"{name}.{kind}.safetensors", {kind: tensor})

    def _save(self, kind: str, name: str, file: str, tensors: Mapping[str, torch.Tensor]) -> None:
        if any(count_nonfinite(tensor) for tensor in tensors.values()):
            raise InputError(
                "the calibration text drives the tensor's statistics to NaN or infinity",
                file=self.source,
                tensor=name,
                remedy="its weights, or those beside it, are finite but too large: download the checkpoint again",
            )
        save_file({key: value.cpu().contiguous() for key, value in tensors.items()}, self.folder / file)
        self.files[kind][name] = file
        self.digests[file] = file_digest(self.folder / file)

    def state(self) -> dict[str, Any]:
        """What is written so far, for `holds` and `take`."""
        return {"files": self.files, "expert_tokens": self.expert_tokens, "digests": self.digests}

    def holds(self, state: Mapping[str, Any]) -> bool:
        """Whether all that an earlier process wrote here is still there with the same bytes."""
        return all(has_digest(self.folder / file, digest) for file, digest in state["digests"].items())

    def take(self, state: Mapping[str, Any]) -> None:
        """Go on from what an earlier process wrote here."""
        self.files, self.expert_tokens = state["files"], state["expert_tokens"]
        self.digests = state["digests"]

    def finish(self, workers: Workers) -> None:
        """The first worker writes down who wrote what."""
        files, expert_tokens = {kind: dict[str, str]() for kind in self.files}, dict[str, dict[str, int]]()
        for their_files, their_tokens in workers.gather((self.files, self.expert_tokens)):
            for kind, found in their_files.items():
                files[kind] |= found
            expert_tokens |= their_tokens
        if workers.is_leader:
            index = {"tokens": self.tokens, "files": files, "expert_tokens": expert_tokens}
            (self.folder / INDEX).write_text(json.dumps(index))
        workers.barrier()


def _pool(experts: Sequence[Moments]) -> Moments:
    """The sums over all experts of a layer."""
    first = experts[0]
    pool = Moments(torch.zeros_like(first.inputs), torch.zeros_like(first.outputs))
    for found in experts:
        pool.include(found)
    return pool
