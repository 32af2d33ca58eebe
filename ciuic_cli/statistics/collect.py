"""Statistics of a whole model: two sweeps over its layers, the results on disk, one file per layer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.statistics.moments import MomentRecorder, Moments, Watched
from ciuic_cli.statistics.streaming import LayerStream, Progress, compute_dtype

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
        return name in self._file

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

    def embedding_use(self, name: str) -> EmbeddingUse | None:
        moment = self._read(name, "embedding_moment", None)
        frequency = self._read(name, "embedding_frequency", None)
        return None if moment is None or frequency is None else EmbeddingUse(moment, frequency)

    def _shrunk(self, name: str, part: str, expert: int | None) -> torch.Tensor | None:
        """One matrix's moment; an expert's is shrunk towards the pool of its layer by token count.

        The weight of the pool is that of as many tokens as the moment has dimensions, so that an expert
        without tokens has the pool's (scaled to one token in the text, hence nearly free to change).
        """
        own = self._read(name, part, expert)
        if expert is None:
            return own
        pool = self._read(name, part, None)
        if pool is None:
            return own
        tokens = self.tokens(name, expert)
        strength = pool.shape[0]
        if part == "inputs":
            return pool if own is None else (tokens * own + strength * pool) / (tokens + strength)
        everyone = max(1, sum(self._tokens[name].values()))
        per_routed = pool * (self.total_tokens / everyone)  # pool of one routed token
        mine = torch.zeros_like(pool) if own is None else own * self.total_tokens  # sum over my tokens
        mixed = (mine + strength * per_routed) / (tokens + strength)  # per routed token
        return mixed * max(tokens, 1) / self.total_tokens


class _Writer:
    def __init__(self, folder: Path, tokens: int) -> None:
        self.folder, self.tokens = folder, tokens
        self.files: dict[str, str] = {}
        self.expert_tokens: dict[str, dict[str, int]] = {}

    def write(
        self, file: str, moments: Mapping[tuple[str, int | None], Moments], extra: dict[str, torch.Tensor]
    ) -> None:
        tensors = dict(extra)
        pools: dict[str, list[Moments]] = {}
        for (name, expert), m in moments.items():
            label = name if expert is None else f"{name}|{expert}"
            tensors[f"{label}|inputs"] = m.inputs / max(m.energy, 1e-30)
            tensors[f"{label}|outputs"] = m.outputs / self.tokens
            self.files[name] = file
            if expert is not None:
                pools.setdefault(name, []).append(m)
                self.expert_tokens.setdefault(name, {})[str(expert)] = m.tokens
        for name, members in pools.items():
            energy = sum(m.energy for m in members)
            tensors[f"{name}|inputs"] = sum_of([m.inputs for m in members]) / max(energy, 1e-30)
            tensors[f"{name}|outputs"] = sum_of([m.outputs for m in members]) / self.tokens
        for key in extra:
            self.files[key.split("|")[0]] = file
        save_file({key: value.cpu().contiguous() for key, value in tensors.items()}, self.folder / file)

    def finish(self) -> None:
        index = {"tokens": self.tokens, "files": self.files, "expert_tokens": self.expert_tokens}
        (self.folder / INDEX).write_text(json.dumps(index))


def sum_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros_like(tensors[0])
    for tensor in tensors:
        total += tensor
    return total


def collect_statistics(
    model_map: ModelMap,
    batches: torch.Tensor,
    folder: Path,
    *,
    device: torch.device,
    seed: int,
    progress: Progress,
    chunk: int = 4,
) -> Statistics:
    """Record G and H of every compressible matrix over the calibration sequences.

    A forward sweep keeps each layer's input on disk; at the end one label per token is sampled from the
    model's own prediction, and a backward sweep, layer by layer, carries its gradient down. Peak memory is
    one layer, its statistics, and one chunk of sequences.

    Args:
        batches: LongTensor (sequences, length).
        folder: receives one safetensors file per layer and `statistics.json`.
    """
    stream = LayerStream(model_map, batches, folder, device=device, dtype=compute_dtype(device), chunk=chunk)
    writer = _Writer(folder, batches.numel())
    stream.forward(progress, keep=True)
    generator = torch.Generator(device=device).manual_seed(seed)
    frequency = _collect_head(stream, writer, model_map, generator)

    @contextmanager
    def visit(prefix: str, layer: nn.Module) -> Iterator[None]:
        recorder = MomentRecorder(_watched(model_map, prefix, layer), stream.dtype)
        with recorder:
            yield
        writer.write(f"{prefix.rstrip('.')}.safetensors", recorder.moments, {})

    stream.backward(visit, progress)
    _collect_embedding(stream, writer, model_map, frequency)
    writer.finish()
    return Statistics(folder)


def _watched(model_map: ModelMap, prefix: str, module: nn.Module) -> list[Watched]:
    return [
        Watched(prefix + name, tensor)
        for name, tensor in module.named_parameters()
        if (parameter := model_map.parameters.get(prefix + name)) is not None and parameter.compress
    ]


def _collect_head(
    stream: LayerStream, writer: _Writer, model_map: ModelMap, generator: torch.Generator
) -> torch.Tensor:
    """G's diagonal and H of the head, and the gradient below it; returns the mean prediction (vocabulary,).

    The head's diagonal is the exact expectation p (1 - p) over the sampled label, so that rare tokens have
    a smooth estimate instead of a few counts.
    """
    head = stream.model.get_output_embeddings()
    name = next(
        (p.tied_to or p.name for p in model_map.parameters.values() if p.role == "head"), "lm_head.weight"
    )
    inputs: list[torch.Tensor] = []
    handle = head.register_forward_pre_hook(lambda _module, args: inputs.append(args[0].detach()))
    vocabulary, width = head.weight.shape
    moments = Moments.zeros(vocabulary, width, stream.device, torch.float32, full=False)
    mean = torch.zeros(vocabulary, device=stream.device)

    def visit(hidden: torch.Tensor, logits: torch.Tensor) -> None:
        probability = logits.detach()[0].float().softmax(-1)
        gradient = probability.clone()
        gradient[torch.arange(len(gradient)), _sample(probability, generator)] -= 1.0
        logits.backward(gradient[None].to(logits.dtype))
        x = inputs.pop()[0].float()
        spread = probability * (1 - probability)
        trace = spread.sum(1)
        moments.inputs.addmm_((x * trace[:, None]).T, x)
        moments.outputs += x.square().sum(1) @ spread
        moments.energy += float((trace * x.square().sum(1)).sum())
        moments.tokens += x.shape[0]
        mean.add_(probability.sum(0))

    stream.tail(visit)
    handle.remove()
    writer.write("head.safetensors", {(name, None): moments}, {})
    return mean / mean.sum()


def _sample(probability: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One label per row of (tokens, vocabulary), by inversion (torch.multinomial is many times slower)."""
    cumulative = probability.cumsum(-1)
    draw = (
        torch.rand((len(probability), 1), generator=generator, device=probability.device) * cumulative[:, -1:]
    )
    return torch.searchsorted(cumulative, draw).clamp_(max=probability.shape[1] - 1)[:, 0]


def _collect_embedding(
    stream: LayerStream, writer: _Writer, model_map: ModelMap, frequency: torch.Tensor
) -> None:
    """Fisher information at the embedding's output, from the gradients that arrived below the first layer."""
    name = next(p.name for p in model_map.parameters.values() if p.role == "embedding")
    width = model_map.parameters[name].shape[1]
    moment = torch.zeros((width, width), device=stream.device)
    for index in range(len(stream.chunks)):
        g = stream.gradient.get(str(index), stream.device).reshape(-1, width)
        moment.addmm_(g.T, g)
        stream.gradient.drop(str(index))
    extra = {f"{name}|embedding_moment": moment / writer.tokens, f"{name}|embedding_frequency": frequency}
    head_file = writer.files.get(name)
    if head_file is None:
        writer.write("embedding.safetensors", {}, extra)
        return
    with safe_open(writer.folder / head_file, framework="pt") as file:  # tied: both uses in one file
        extra |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    writer.write(head_file, {}, extra)
