"""The statistics of a model on disk: the writer that the sweeps use, and the reader for everything after them.

Per matrix or expert stack there is one safetensors file with H, and one with G, normalised: H to unit trace, G to one
token of the text that ran backward. Full moments are stored in a compact form (`compact.py`), diagonals in float32,
contexts of a head in bfloat16. Matrices with the same inputs share the file with H. `statistics.json` lists the files,
and how many tokens each expert saw in either. Files can be deleted when nothing needs them any more.

An expert sees only few tokens, so `Statistics._shrunk` shrinks its moments towards the pool, the sum over all experts
of its layer. An expert has k tokens, and the pool of an n-dimensional moment counts for n tokens:

    H_expert = (k H_own + n H_pool) / (k + n)

The same formula holds for G per token routed to the expert; the result is then scaled by k / (tokens of the text). An
expert without tokens gets the pool's moments with k = 1, so that changing it costs nearly nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from ciuic_cli.checkpoint.formats import count_nonfinite
from ciuic_cli.errors import EnvironmentFault, InputError
from ciuic_cli.layerwise.activation_store import has_digest
from ciuic_cli.layerwise.linear_hooks import Key
from ciuic_cli.process.digests import file_digest
from ciuic_cli.process.file_faults import reading
from ciuic_cli.process.memory import exhaustion
from ciuic_cli.process.threads import parallel_map
from ciuic_cli.process.workers import Workers
from ciuic_cli.profiling.account import counted_here
from ciuic_cli.statistics import lower_half
from ciuic_cli.statistics.compact import compact, expanded
from ciuic_cli.statistics.experts import DIAGONAL_PRIOR_TOKENS, root_ratios
from ciuic_cli.statistics.moments import Moments

INDEX = "statistics.json"
INPUTS, OUTPUTS = MOMENTS = ("inputs", "outputs")
"""Kinds of the files with H and with G."""
EMBEDDING, TOKEN_FISHER, FREQUENCY, CONTEXTS = SINGLE_TENSOR_KINDS = (
    "embedding_moment", "token_fisher", "frequency", "contexts",
)  # fmt: skip
"""Kinds of files that hold one tensor, named like the kind."""
_PARALLEL_BYTES = 64 << 20
"""Most bytes of a parameter's moments that are written beside others. Their compact form takes half of these bytes in
addition. Chosen, not tuned."""


class StatisticsWriter:
    """Writes each parameter's moments, normalised, to a file of its own.

    Args:
        folder: shared by all workers; each writes the parameters that it owns.
        input_tokens: of the whole text, for H.
        output_tokens: of the text that runs backward, for G.
        source: the checkpoint's folder, for messages.
    """

    def __init__(self, folder: Path, input_tokens: int, output_tokens: int, source: Path) -> None:
        self.folder, self.source = folder, source
        self.tokens = {INPUTS: input_tokens, OUTPUTS: output_tokens}
        self.files: dict[str, dict[str, str]] = {kind: {} for kind in (*MOMENTS, *SINGLE_TENSOR_KINDS)}
        self.expert_tokens: dict[str, dict[str, dict[str, int]]] = {kind: {} for kind in MOMENTS}
        self.digests: dict[str, str] = {}

    def write(self, moments: Mapping[Key, Moments]) -> None:
        """Write the sums of matrices and of experts, for H or G or both; they are normalised in place, to save memory.

        Raises InputError if one of them is NaN or infinite.
        """
        by_name: dict[str, dict[int | None, Moments]] = {}
        for (name, expert), each in moments.items():
            by_name.setdefault(name, {})[expert] = each
        threads = torch.get_num_threads()

        def side_by_side(parameter: tuple[str, dict[int | None, Moments]]) -> int:
            nbytes = sum(each.inputs.nbytes + each.outputs.nbytes for each in parameter[1].values())
            return threads if nbytes <= _PARALLEL_BYTES else 1

        def write(parameter: tuple[str, dict[int | None, Moments]]) -> None:
            self._write_parameter(*parameter)

        for _ in parallel_map(by_name.items(), counted_here(write), side_by_side):
            pass

    def share_inputs(self, firsts: Mapping[str, str]) -> None:
        """Give matrices the H of the first one with the same inputs, where this worker has written it."""
        files = self.files[INPUTS]
        files |= {name: files[first] for name, first in firsts.items() if first in files}

    def write_single(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor of a parameter, of a kind in `SINGLE_TENSOR_KINDS`; raises as `write`.

        Contexts are stored in bfloat16: their products v vᵀ stay positive semidefinite.
        """
        if kind == CONTEXTS:
            tensor = tensor.bfloat16()
        self._save(kind, name, f"{name}.{kind}.safetensors", {kind: tensor})

    def finish(self, workers: Workers) -> None:
        """Write the index of all workers' files; the first worker does, the others wait."""
        files = {kind: dict[str, str]() for kind in self.files}
        expert_tokens = {kind: dict[str, dict[str, int]]() for kind in self.expert_tokens}
        for their_files, their_tokens in workers.gather((self.files, self.expert_tokens)):
            for kind, names in their_files.items():
                files[kind] |= names
            for kind, tokens in their_tokens.items():
                expert_tokens[kind] |= tokens
        if workers.is_leader:
            index = {"tokens": self.tokens, "files": files, "expert_tokens": expert_tokens}
            (self.folder / INDEX).write_text(json.dumps(index, sort_keys=True))
        workers.barrier()

    def state(self) -> dict[str, Any]:
        """Description of all files written so far, as JSON, for `is_intact` and `restore`."""
        return {"files": self.files, "expert_tokens": self.expert_tokens, "digests": self.digests}

    def is_intact(self, state: Mapping[str, Any]) -> bool:
        """Whether all files that `state` describes are here with the same bytes."""
        return all(has_digest(self.folder / file, digest) for file, digest in state["digests"].items())

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with the files that `state` describes."""
        self.files, self.expert_tokens = state["files"], state["expert_tokens"]
        self.digests = state["digests"]

    def _write_parameter(self, name: str, members: dict[int | None, Moments]) -> None:
        """Normalise and write a parameter's moments.

        members: moments by expert. The key None is a matrix, or the pool of a stack; a missing pool is summed up here.
        """
        experts = [
            (expert, each)
            for expert, each in sorted(members.items(), key=lambda member: member[0] or 0)
            if expert is not None
        ]
        if None not in members:
            members[None] = _pool([each for _, each in experts])
        for each in members.values():
            each.scale(1 / max(each.trace, 1e-30), each.energy_ratio / self.tokens[OUTPUTS])
        for kind in MOMENTS:
            tensors: dict[str, torch.Tensor] = {}
            for expert, each in members.items():
                moment: torch.Tensor = getattr(each, kind)
                if moment.numel():
                    self._add(tensors, _tensor_name(kind, expert), moment, name)
            if tensors:
                if experts:
                    self.expert_tokens[kind][name] = {str(expert): each.tokens for expert, each in experts}
                self._save(kind, name, f"{name}.{kind}.safetensors", tensors)

    def _add(self, tensors: dict[str, torch.Tensor], key: str, moment: torch.Tensor, name: str) -> None:
        """Add a moment to a file's tensors: a diagonal as it is, the lower half of a full one in the compact form."""
        for part in [moment] if moment.dim() == 1 else lower_half.blocks(moment):
            self._require_finite(name, part)
        if moment.dim() == 1:
            tensors[key] = moment
        else:
            tensors |= {f"{key}|{part}": tensor for part, tensor in compact(moment).items()}

    def _require_finite(self, name: str, tensor: torch.Tensor) -> None:
        if count_nonfinite(tensor):
            raise InputError(
                "the calibration text drives the tensor's statistics to NaN or infinity",
                file=self.source,
                tensor=name,
                remedy="its weights, or those beside it, are finite but too large: download the checkpoint again",
            )

    def _save(self, kind: str, name: str, file: str, tensors: Mapping[str, torch.Tensor]) -> None:
        for tensor in tensors.values():
            if tensor.is_floating_point():
                self._require_finite(name, tensor)
        save_file({key: value.cpu().contiguous() for key, value in tensors.items()}, self.folder / file)
        self.files[kind][name] = file
        self.digests[file] = file_digest(self.folder / file)


def _tensor_name(kind: str, expert: int | None = None) -> str:
    """Name in a file of one kind in MOMENTS; without an expert that of a matrix, or of the pool of a stack."""
    return kind if expert is None else f"{expert}|{kind}"


def _pool(experts: Sequence[Moments]) -> Moments:
    """The sums over all experts of a stack."""
    first = experts[0]
    pool = Moments(torch.zeros_like(first.inputs), torch.zeros_like(first.outputs), halves=first.halves)
    for each in experts:
        pool.include(each)
    return pool


@dataclass(frozen=True)
class EmbeddingUse:
    """Fisher information of the input embedding's rows; `embedding_fisher.py` has the formulas.

    moment: (n, n) float32, the second moment of the rows' gradients, with unit trace. token_fisher: (vocabulary,)
    float32, squared gradient per occurrence of each token. frequency: (vocabulary,) float32, the share of each token in
    the model's own predictions, above 0 also for tokens that the text lacks.
    """

    moment: torch.Tensor
    token_fisher: torch.Tensor
    frequency: torch.Tensor


class Statistics:
    """Reads what `collect_statistics` wrote into `folder`; keeps no tensors in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with _damage(folder / INDEX):
            index = json.loads((folder / INDEX).read_text())
            self._total_tokens: dict[str, int] = {kind: index["tokens"][kind] for kind in MOMENTS}
            self._files: dict[str, dict[str, str]] = {
                kind: index["files"][kind] for kind in (*MOMENTS, *SINGLE_TENSOR_KINDS)
            }
            self._tokens: dict[str, dict[str, dict[str, int]]] = {
                kind: index["expert_tokens"][kind] for kind in MOMENTS
            }

    def covers(self, name: str) -> bool:
        """True if the parameter, or an expert of a stack, has both H and G.

        No gradient passes through an indexer's choice of tokens, so an indexer has no G.
        """
        return any(name in self._files[kind] for kind in (OUTPUTS, EMBEDDING))

    def parameters_of(self, file: str) -> list[str]:
        """The parameters to which a file in the folder belongs; none for the index."""
        return [name for files in self._files.values() for name, its in files.items() if its == file]

    def delete(self, name: str, is_finished: Callable[[str], bool]) -> None:
        """Delete the parameter's files, but not what it shares with a parameter that is not finished. `covers` and
        `tokens` still answer; reading its moments raises."""
        for files in self._files.values():
            sharing = self.parameters_of(files[name]) if name in files else []
            if sharing and all(is_finished(other) for other in sharing if other != name):
                (self.folder / files[name]).unlink(missing_ok=True)

    @property
    def total_tokens(self) -> int:
        """Calibration tokens."""
        return self._total_tokens[INPUTS]

    def tokens(self, name: str, expert: int | None = None) -> int:
        """Calibration tokens that reached the matrix."""
        return self.total_tokens if expert is None else self._expert_tokens(name, INPUTS, expert)

    def input_moment(self, name: str, expert: int | None = None) -> torch.Tensor | None:
        """H (n, n) float32 with unit trace; None if the parameter is not covered."""
        return self._shrunk(name, INPUTS, expert) if self.covers(name) else None

    def output_fisher(self, name: str, expert: int | None = None) -> torch.Tensor | None:
        """G (m, m) float32 or its diagonal (m,), per token; None if the parameter is not covered."""
        return self._shrunk(name, OUTPUTS, expert)

    def pool(self, name: str, part: str) -> torch.Tensor | None:
        """The moment (n, n) of all experts of a stack together; part: "inputs" or "outputs"."""
        return self._read(name, part, None)

    def pool_ratios(self, name: str, part: str, expert: int) -> torch.Tensor | None:
        """r (n,) float32 if the expert's moment is diag(r) pool diag(r); None if it has correlations of its own.

        part: "inputs" or "outputs".
        """
        variances = self._mixed_variances(name, part, expert)
        return None if variances is None else root_ratios(*variances)

    def contexts(self, name: str) -> torch.Tensor | None:
        """Vectors v (vocabulary, n) bfloat16, one per row of a head; None for other matrices.

        For each row, with p its token's probability and x the head's inputs,

            Σ p (1-p) x xᵀ / Σ p (1-p) |x|²  ≈  residual + v vᵀ

        v vᵀ is the share of the row's mean input (`context_vectors` in `head_fisher.py` shrinks it if inputs are few).
        The residual is common to all rows.
        """
        return self._single(CONTEXTS, name) if name in self._files[CONTEXTS] else None

    def embedding_use(self, name: str) -> EmbeddingUse | None:
        """None if `name` is not the input embedding."""
        if name not in self._files[EMBEDDING]:
            return None
        return EmbeddingUse(*(self._single(kind, name) for kind in (EMBEDDING, TOKEN_FISHER, FREQUENCY)))

    def _shrunk(self, name: str, part: str, expert: int | None) -> torch.Tensor | None:
        """One moment; an expert's is shrunk towards the pool of its layer.

        The pool counts for as many tokens as the moment has dimensions; for an expert with diagonals it counts for
        DIAGONAL_PRIOR_TOKENS.
        """
        if expert is not None and (variances := self._mixed_variances(name, part, expert)) is not None:
            of_pool, of_expert = variances
            with self._moments_of(name, part) as file:
                correlations = file.get_tensor(f"{_tensor_name(part)}|correlations")
            return expanded(torch.where(of_pool > 0, of_expert, 0.0), correlations)
        own = self._read(name, part, expert)
        if expert is None:
            return own
        pool = self.pool(name, part)
        return own if pool is None else self._mixed(name, part, expert, own, pool, pool.shape[0])

    def _mixed_variances(self, name: str, part: str, expert: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Diagonals (n,) of the pool's moment and of an expert's, which is mixed with the pool's; None unless the pool
        has correlations and the expert has none.
        """
        if name not in self._files[part]:
            return None
        of_pool, of_expert = f"{_tensor_name(part)}|diagonal", _tensor_name(part, expert)
        with self._moments_of(name, part) as file:
            if not {of_pool, of_expert} <= set(file.keys()):
                return None
            pool, own = file.get_tensor(of_pool), file.get_tensor(of_expert)
        return pool, self._mixed(name, part, expert, own, pool, DIAGONAL_PRIOR_TOKENS)

    def _mixed(
        self,
        name: str,
        part: str,
        expert: int,
        own: torch.Tensor | None,
        pool: torch.Tensor,
        prior_tokens: int,
    ) -> torch.Tensor:
        """The mean of an expert's moment, weighted by its tokens, and of the pool, weighted by `prior_tokens`."""
        tokens = self._expert_tokens(name, part, expert)
        if part == INPUTS:
            return pool if own is None else (tokens * own + prior_tokens * pool) / (tokens + prior_tokens)
        routed_tokens = max(1, sum(self._tokens[part][name].values()))  # over all experts
        total_tokens = self._total_tokens[part]
        pool_per_routed_token = pool * (total_tokens / routed_tokens)
        own_sum = torch.zeros_like(pool) if own is None else own * total_tokens
        per_routed_token = (own_sum + prior_tokens * pool_per_routed_token) / (tokens + prior_tokens)
        return per_routed_token * max(tokens, 1) / total_tokens

    def _expert_tokens(self, name: str, part: str, expert: int) -> int:
        return self._tokens[part].get(name, {}).get(str(expert), 0)

    def _read(self, name: str, part: str, expert: int | None) -> torch.Tensor | None:
        if name not in self._files[part]:
            return None
        key = _tensor_name(part, expert)
        with self._moments_of(name, part) as file:
            keys = file.keys()
            if f"{key}|diagonal" in keys:
                return expanded(*(file.get_tensor(f"{key}|{half}") for half in ("diagonal", "correlations")))
            return file.get_tensor(key) if key in keys else None

    @contextmanager
    def _moments_of(self, name: str, part: str) -> Iterator[Any]:
        """The opened file with one of the parameter's moments."""
        path = self.folder / self._files[part][name]
        with _damage(path), safe_open(path, framework="pt") as file:
            yield file

    def _single(self, kind: str, name: str) -> torch.Tensor:
        path = self.folder / self._files[kind][name]
        with _damage(path):
            return load_file(path)[kind]


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Convert errors of reading a file that this run wrote to an EnvironmentFault that names the file."""
    try:
        with reading(path):
            yield
    except (SafetensorError, LookupError, TypeError, ValueError) as error:
        if exhaustion(error) is not None:
            raise
        raise EnvironmentFault(
            f"the statistics of this run were damaged on the disk: {type(error).__name__}: {error!s:.200}",
            file=path,
            remedy="run the same command again: it collects them again",
        ) from error
