"""Statistics of a whole model: two sweeps over its layers, the results on disk, one file per matrix or stack."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.statistics.experts import DIAGONAL_TOKENS, with_diagonal
from ciuic_cli.statistics.marks import Journal, Marks
from ciuic_cli.statistics.moments import Key, MomentRecorder, Moments, Watched
from ciuic_cli.statistics.store import file_digest
from ciuic_cli.statistics.streaming import LayerStream, Progress, compute_dtype
from ciuic_cli.statistics.sums import OrderedSums, segments_of, share_of
from ciuic_cli.threads import one_thread
from ciuic_cli.workers import Workers

INDEX = "statistics.json"


@dataclass(frozen=True)
class EmbeddingUse:
    """How the input embedding matters: the Fisher information at its output, and per token of the vocabulary.

    moment: (n, n) float32, Σ g gᵀ / N over tokens; frequency: (vocabulary,) float32, the expected share of each
    token as the model itself predicts it (smooth: no token has none).
    """

    moment: torch.Tensor
    frequency: torch.Tensor


class Statistics:
    """Reads what `collect_statistics` wrote into `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = json.loads((folder / INDEX).read_text())
        self.total_tokens: int = index["tokens"]
        self._file: dict[str, str] = index["files"]
        self._embedding_moments: dict[str, str] = index["embedding_moments"]
        self._frequencies: dict[str, str] = index["frequencies"]
        self._contexts: dict[str, str] = index["contexts"]
        self._tokens: dict[str, dict[str, int]] = index["expert_tokens"]

    def _read(self, name: str, part: str, expert: int | None) -> torch.Tensor | None:
        if name not in self._file:
            return None
        key = f"{name}|{part}" if expert is None else f"{name}|{expert}|{part}"
        with safe_open(self.folder / self._file[name], framework="pt") as file:
            return file.get_tensor(key) if key in file.keys() else None  # noqa: SIM118 (not a dict)

    def covers(self, name: str) -> bool:
        """Whether anything was recorded for the matrix or its layer's pool of experts.

        Nothing is where no gradient passes: an indexer's choice of tokens has none.
        """
        return name in self._file or name in self._embedding_moments

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
        return self._only(self._contexts, name)

    def embedding_use(self, name: str) -> EmbeddingUse | None:
        moment, frequency = self._only(self._embedding_moments, name), self._only(self._frequencies, name)
        return None if moment is None or frequency is None else EmbeddingUse(moment, frequency)

    def _only(self, files: Mapping[str, str], name: str) -> torch.Tensor | None:
        """The tensor of a file that has one."""
        return load_file(self.folder / files[name])[_ONLY] if name in files else None

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


_INDEXED = ("files", "embedding_moments", "frequencies", "contexts", "expert_tokens")
_ONLY = "values"


class _Writer:
    """Writes each matrix's moments, normalised, to a file of its own; nothing is held twice in memory."""

    def __init__(self, folder: Path, tokens: int) -> None:
        self.folder, self.tokens = folder, tokens
        self.files: dict[str, str] = {}
        self.embedding_moments: dict[str, str] = {}
        self.frequencies: dict[str, str] = {}
        self.contexts: dict[str, str] = {}
        self.expert_tokens: dict[str, dict[str, int]] = {}
        self.digests: dict[str, str | None] = {}

    def write(self, moments: Mapping[Key, Moments]) -> None:
        by_name: dict[str, dict[int | None, Moments]] = {}
        for (name, expert), found in moments.items():
            by_name.setdefault(name, {})[expert] = found
        for name, members in by_name.items():
            self._write_one(name, members)

    def _write_one(self, name: str, members: dict[int | None, Moments]) -> None:
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
            tensors[f"{label}|outputs"] = found.outputs.div_(self.tokens)
        self.files[name] = self._save(name, tensors)

    def write_embedding_moment(self, name: str, moment: torch.Tensor) -> None:
        self.embedding_moments[name] = self._save(f"{name}.embedding_moment", {_ONLY: moment})

    def write_frequency(self, name: str, frequency: torch.Tensor) -> None:
        self.frequencies[name] = self._save(f"{name}.frequency", {_ONLY: frequency})

    def write_contexts(self, name: str, contexts: torch.Tensor) -> None:
        self.contexts[name] = self._save(f"{name}.contexts", {_ONLY: contexts})

    def _save(self, name: str, tensors: Mapping[str, torch.Tensor]) -> str:
        file = f"{name}.safetensors"
        save_file({key: value.cpu().contiguous() for key, value in tensors.items()}, self.folder / file)
        self.digests[file] = file_digest(self.folder / file)
        return file

    def state(self) -> dict[str, Any]:
        """What is written so far, for `restore`."""
        return {key: getattr(self, key) for key in (*_INDEXED, "digests")}

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Take over what an earlier process wrote here; False, and nothing taken, where a file has other bytes."""
        intact = all(file_digest(self.folder / file) == digest for file, digest in state["digests"].items())
        if intact:
            for key in (*_INDEXED, "digests"):
                setattr(self, key, state[key])
        return intact

    def finish(self, workers: Workers) -> None:
        """The first worker writes down who wrote what."""
        found: dict[str, dict[str, Any]] = {key: {} for key in _INDEXED}
        for theirs in workers.gather({key: getattr(self, key) for key in found}):
            for key, mine in found.items():
                mine |= theirs[key]
        if workers.leads:
            (self.folder / INDEX).write_text(json.dumps({"tokens": self.tokens, **found}))
        workers.wait()


def _pool(experts: Sequence[Moments]) -> Moments:
    """The sums over all experts of a layer."""
    first = experts[0]
    pool = Moments(torch.zeros_like(first.inputs), torch.zeros_like(first.outputs))
    for found in experts:
        pool.include(found)
    return pool


CHUNK = 4
"""Sequences that run through a layer at a time."""


def collect_statistics(
    model_map: ModelMap,
    batches: torch.Tensor,
    folder: Path,
    *,
    device: torch.device,
    seed: int,
    progress: Progress,
    chunk: int = CHUNK,
    workers: Workers | None = None,
    journal: Journal | None = None,
) -> Statistics:
    """Record G and H of every compressible matrix over the calibration sequences.

    A forward sweep keeps each layer's input on disk; at the end one label per token is sampled from the
    model's own prediction, and a backward sweep, layer by layer, carries its gradient down. Peak memory is
    one layer, its statistics twice, and one chunk of sequences.

    Args:
        batches: LongTensor (sequences, length).
        folder: receives one safetensors file per parameter and `statistics.json`.
        workers: share the sequences; the files have the same bytes for any number of them. The folder is theirs all.
        journal: with it, sweeps that were killed go on behind the last layer that was finished.
    """
    workers = workers or Workers()
    chunks = batches.split(chunk)
    shares = share_of(segments_of(len(chunks)), workers)
    numbers = [number for share in shares for number in share]
    ends = itertools.accumulate((len(share) for share in shares), initial=0)
    stream = LayerStream(
        model_map, [chunks[number] for number in numbers], folder / f"stream-{workers.rank}",
        device=device, dtype=compute_dtype(device),
    )  # fmt: skip
    return _Collection(
        model_map, stream, _Writer(folder, batches.numel()), workers, Marks(journal, workers), seed, progress, chunk,
        numbers, [range(begin, end) for begin, end in itertools.pairwise(ends)],
    ).run()  # fmt: skip


@dataclass(frozen=True)
class _Collection:
    """One worker's part of the sweeps: its segments of the text, and the matrices whose sums it owns.

    numbers: of this worker's chunks, in the whole text; segments: of its chunks, as the stream counts them.
    """

    map: ModelMap
    stream: LayerStream
    writer: _Writer
    workers: Workers
    marks: Marks
    seed: int
    progress: Progress
    chunk: int
    numbers: list[int]
    segments: list[range]

    def run(self) -> Statistics:
        """The steps in order, from the first that is not finished yet: forward, head, backward, embedding."""
        layers = len(self.stream.prefixes)
        steps: list[tuple[str, Callable[[], None]]] = [
            *(("forward", partial(self.stream.forward_layer, number)) for number in range(layers)),
            ("head", self._head),
            *(("backward", partial(self._layer, number)) for number in reversed(range(layers))),
            ("embedding", self._embedding),
        ]
        begun = self._resumed(len(steps))
        if begun < len(steps):
            self.stream.begin()
        for number, (what, step) in enumerate(steps[begun:], begun):
            step()
            if number >= layers:
                self.stream.sweep()  # all have marked the step before this one, else they would not have met in it
                self.stream.release(2 * layers - number)
            self.marks.save(number, self._state())
            if what in ("forward", "backward"):
                self.progress(what, number % (layers + 1) + 1, layers)
        self.writer.finish(self.workers)
        shutil.rmtree(self.stream.folder)
        return Statistics(self.writer.folder)

    def _state(self) -> dict[str, Any]:
        return {
            "hidden": self.stream.hidden.contents(), "gradient": self.stream.gradient.contents(),
            "written": self.writer.state(),
        }  # fmt: skip

    def _resumed(self, steps: int) -> int:
        """How many steps are finished, with what they left taken over."""
        last = self.marks.last(steps)
        if last is None:
            return 0
        step, state = last
        intact = (
            self.stream.hidden.restore(state["hidden"])
            and self.stream.gradient.restore(state["gradient"])
            and self.writer.restore(state["written"])
        )
        return step + 1 if all(self.workers.gather(intact)) else 0

    def _sums(self, names: Sequence[str]) -> OrderedSums:
        return OrderedSums(self.workers, names, self.stream.device)

    def _layer(self, number: int) -> None:
        prefix = self.stream.prefixes[number]
        with self.stream.backward_layer(number) as (layer, carry):
            watched = [
                Watched(prefix + name, tensor)
                for name, tensor in layer.named_parameters()
                if (parameter := self.map.parameters.get(prefix + name)) is not None and parameter.compress
            ]
            sums = self._sums([item.name for item in watched])
            for segment in self.segments:
                recorder = MomentRecorder(watched, self.stream.dtype)
                with recorder:
                    carry(segment)
                sums.add(recorder.moments)
        self.writer.write(sums.totals)

    def _head(self) -> None:
        """G's diagonal and H of the head, and the gradient below it.

        The first worker, which owns them, keeps the rows' contexts and the mean prediction too. The head's diagonal
        is the exact expectation p (1 - p) over the sampled label, so that rare tokens have a smooth estimate instead
        of a few counts.
        """
        device = self.stream.device
        head = self.stream.model.get_output_embeddings()
        name = next(
            (p.tied_to or p.name for p in self.map.parameters.values() if p.role == "head"), "lm_head.weight"
        )
        inputs: list[torch.Tensor] = []
        handle = head.register_forward_pre_hook(lambda _module, args: inputs.append(args[0].detach()))
        vocabulary, width = head.weight.shape
        sequences = (
            number * self.chunk + row
            for local, number in enumerate(self.numbers)
            for row in range(len(self.stream.chunks[local]))
        )
        generator = torch.Generator(device=device)

        def nothing() -> tuple[Moments, Moments]:
            """H and G's diagonal; of every row Σ p(1-p) x, and Σ p, Σ p(1-p) and Σ (p(1-p))²."""
            sums = torch.zeros(vocabulary, width, device=device), torch.zeros(3, vocabulary, device=device)
            return _nothing(vocabulary, width, device), Moments(*sums)

        moments, rows = nothing()

        def visit(hidden: torch.Tensor, logits: torch.Tensor) -> None:
            probability = logits.detach()[0].float().softmax(-1)
            gradient = probability.clone()
            generator.manual_seed(label_seed(self.seed, next(sequences)))
            gradient[torch.arange(len(gradient)), _sample(probability, generator)] -= 1.0
            logits.backward(gradient[None].to(logits.dtype))
            x = inputs.pop()[0].float()
            spread = probability * (1 - probability)
            trace = spread.sum(1)
            moments.inputs.addmm_((x * trace[:, None]).T, x)
            moments.outputs += x.square().sum(1) @ spread
            with one_thread():
                moments.energy += float((trace * x.square().sum(1)).sum())
            moments.tokens += x.shape[0]
            rows.inputs.addmm_(spread.T, x)
            rows.outputs += torch.stack((probability.sum(0), spread.sum(0), spread.square().sum(0)))

        sums, of_rows = self._sums([name]), self._sums([name])
        with self.stream.tail(visit) as carry:
            for segment in self.segments:
                moments, rows = nothing()
                carry(segment)
                sums.add({(name, None): moments} if segment else {})
                of_rows.add({(name, None): rows} if segment else {})
        handle.remove()
        if of_rows.totals:
            found, importance = of_rows.totals[name, None], sums.totals[name, None].outputs
            total, spread, squares = found.outputs
            with one_thread():
                frequency = total / total.sum()
            self.writer.write_frequency(self._embedding_name(), frequency)
            seen = spread.square() / squares.clamp_min(1e-30)  # contexts, as many as count
            kept = seen / ((seen + 1.0) * spread * importance).clamp_min(1e-30)
            self.writer.write_contexts(name, found.inputs.mul_(kept.sqrt()[:, None]))
        self.writer.write(sums.totals)

    def _embedding(self) -> None:
        """Fisher information at the embedding's output, from the gradients that arrived below the first layer."""
        name = self._embedding_name()
        width = self.map.parameters[name].shape[1]
        sums = self._sums([name])
        for segment in self.segments:
            part = _nothing(0, width, self.stream.device)
            for index in segment:
                g = self.stream.gradient.get(f"0.{index}", self.stream.device).reshape(-1, width)
                part.inputs.addmm_(g.T, g)
            sums.add({(name, None): part} if segment else {})
        if sums.totals:
            moment = sums.totals[name, None].inputs / self.writer.tokens
            self.writer.write_embedding_moment(name, moment)

    def _embedding_name(self) -> str:
        return next(p.name for p in self.map.parameters.values() if p.role == "embedding")


def label_seed(seed: int, sequence: int) -> int:
    """Of the labels of one sequence: the same whoever draws them."""
    return (seed << 30) + sequence


def _nothing(rows: int, cols: int, device: torch.device) -> Moments:
    return Moments.zeros(rows, cols, device, torch.float32, full_outputs=False)


def _sample(probability: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One label per row of (tokens, vocabulary), by inversion (torch.multinomial is many times slower)."""
    cumulative = probability.cumsum(-1)
    draw = (
        torch.rand((len(probability), 1), generator=generator, device=probability.device) * cumulative[:, -1:]
    )
    return torch.searchsorted(cumulative, draw).clamp_(max=probability.shape[1] - 1)[:, 0]
