"""The checkpoint seen as a model: every parameter with its role and sources, read or streamed layer by layer.

`map_model` needs the config and the headers, and reads the tables of expert ids if there are any. Reading then
goes one parameter, one expert or one decoder layer at a time: `materialise` gives a layer of the skeleton its
weights, `release` takes them away again, and the result equals a full `from_pretrained` bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.core_model_loading import build_glob_alternation

from ciuic_cli.checkpoint.architecture import (
    build_config,
    build_meta_model,
    initialise_buffers,
    layer_prefixes,
    require_plausible,
)
from ciuic_cli.checkpoint.expert_ids import expert_tables, require_experts
from ciuic_cli.checkpoint.mtp import COUNT_KEY, PredictionLayers
from ciuic_cli.checkpoint.naming import Assembly, plan_names
from ciuic_cli.checkpoint.reader import TORCH_DTYPES, Checkpoint, holds
from ciuic_cli.checkpoint.roles import classify
from ciuic_cli.checkpoint.tying import resolve_ties
from ciuic_cli.checkpoint.unexpected import sort_unexpected
from ciuic_cli.errors import InputError

_MODEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Parameter:
    """One parameter or persistent buffer of the model.

    `role` is a short stable word for reports. Where `compress` is False, `reason` says why. `sources` are the
    checkpoint's tensors it is made of. `tied_to` names the parameter whose values it shares: such a one is
    stored and counted there, not here. A `buffer` (a router's bias, a lookup table) is no trained weight: it
    is stored but does not count as a parameter.
    """

    name: str
    shape: tuple[int, ...]
    role: str
    compress: bool
    reason: str
    sources: tuple[str, ...]
    tied_to: str | None = None
    buffer: bool = False

    @property
    def numel(self) -> int:
        """Number of weights."""
        return int(torch.Size(self.shape).numel())


@dataclass(frozen=True)
class ModelMap:
    """A checkpoint and transformers' model of it. Build with `map_model`.

    `parameters` are in the model's order, by in-memory name. `layer_prefixes` are the decoder layers
    ("model.layers.0."). `warnings` are for the user. `mtp` are the checkpoint's multi-token-prediction layers,
    `mtp_tensors` the names of their tensors; `keeping.keep_mtp` makes parameters of these.
    """

    checkpoint: Checkpoint
    config: PretrainedConfig
    dtype: torch.dtype
    parameters: dict[str, Parameter]
    layer_prefixes: list[str]
    warnings: list[str]
    mtp: PredictionLayers
    mtp_tensors: list[str]
    assemblies: dict[str, Assembly]
    dtype_rules: dict[torch.dtype, dict[str, torch.dtype]]

    @property
    def stored_numel(self) -> int:
        """Weights of the model, tied ones once, buffers not counted."""
        return sum(
            parameter.numel
            for parameter in self.parameters.values()
            if parameter.tied_to is None and not parameter.buffer
        )

    @property
    def fixed_dtypes(self) -> dict[str, torch.dtype]:
        """In-memory dtypes of the parameters and buffers that do not have the model's `dtype`, by name."""
        return self.dtype_rules[self.dtype]

    def stored_dtype(self, name: str) -> torch.dtype:
        """The dtype that a parameter or buffer has in memory, and in an artifact where it is stored as it is."""
        return self.fixed_dtypes.get(name, self.dtype)

    @property
    def source_config(self) -> dict[str, Any]:
        """The checkpoint's config.json as it holds for what is stored.

        Without `auto_map` and `quantization_config`; `tie_word_embeddings` false where the values differ; no
        multi-token-prediction layers promised that are not kept; with the model's dtype.
        """
        dropped = ("auto_map", "quantization_config")
        values = {key: value for key, value in self.checkpoint.config.items() if key not in dropped}
        if not self.config.tie_word_embeddings and values.get("tie_word_embeddings", True):
            values["tie_word_embeddings"] = False
        if values.get(COUNT_KEY) and not self.mtp.kept:
            values[COUNT_KEY] = 0
        if not (values.get("dtype") or values.get("torch_dtype")):
            # transformers would take it from the first file, where there may be nothing but blobs.
            values["dtype"] = str(self.dtype).removeprefix("torch.")
        return values

    @cached_property
    def _conversion_model(self) -> Any:
        return self.meta_model()

    def meta_model(self, **options: Any) -> Any:
        """A fresh model on the meta device. `options` as in `build_meta_model`."""
        return build_meta_model(self.config, self.dtype, **options)

    def skeleton(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu", **options: Any
    ) -> Any:
        """A fresh meta model whose non-persistent buffers (rotary frequencies, ...) are real, on `device`."""
        model = build_meta_model(self.config, dtype or self.dtype, **options)
        initialise_buffers(model, device)
        return model

    def read(self, name: str) -> torch.Tensor:
        """A parameter in its in-memory shape: the checkpoint's dtype, float32 where FP8 or FP4 was decoded.

        An expert stack is assembled whole; prefer `read_expert` for large ones. Raises InputError for a number that
        is NaN or infinite, or would be in the model's dtype; so do `read_expert` and `read_rows`.
        """
        assembly = self._assembly(name)
        if assembly.stacks_experts:
            count = self.parameters[name].shape[0]
            return torch.stack([self.read_expert(name, expert) for expert in range(count)])
        if assembly.converter is None:
            return self._reader(name)(assembly.source_names[0])
        return assembly.build(self._reader(name), self._conversion_model)[name]

    def read_expert(self, name: str, expert: int) -> torch.Tensor:
        """One expert of a fused stack: (out, in), other experts are not read."""
        assembly = self._assembly(name)
        shape = self.parameters[name].shape
        if len(shape) != 3 or not 0 <= expert < shape[0]:
            raise ValueError(f"{name} of shape {shape} has no expert {expert}")
        if assembly.stacks_experts:
            return torch.cat([self._reader(name)(source) for source in assembly.expert_sources(expert)])
        if assembly.converter is None:
            return self._reader(name)(assembly.source_names[0], (expert, expert + 1))[0]
        return self.read(name)[expert].clone()

    def read_rows(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Rows [begin, end) of a matrix, for embeddings that are too large to read at once."""
        assembly = self._assembly(name)
        if assembly.converter is None:
            return self._reader(name)(assembly.source_names[0], (begin, end))
        return self.read(name)[begin:end].clone()

    def materialise(
        self,
        module: nn.Module,
        prefix: str,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        *,
        stack_dtype: torch.dtype | None = None,
        stack_device: torch.device | str | None = None,
    ) -> None:
        """Fill `module`, the submodule of the skeleton whose parameters begin with `prefix`, in place.

        Weights get `dtype` (default: the checkpoint's own), except those that transformers keeps in float32;
        expert stacks get `stack_dtype` and go to `stack_device` where these are given.
        They require no gradient. Non-persistent buffers move to `device`.
        """
        done: dict[str, torch.Tensor] = {}
        for owner, short, name, is_buffer in _own_tensors(module, prefix):
            key = self.parameters[name].tied_to or name
            if key not in done:
                stacked = len(self.parameters[key].shape) == 3
                place = stack_device if stacked and stack_device is not None else device
                value = self._load(name, stack_dtype if stacked and stack_dtype is not None else dtype, place)
                done[key] = value if is_buffer else nn.Parameter(value, requires_grad=False)
            setattr(owner, short, done[key])
        for owner, short, buffer in _transient_buffers(module):
            if buffer.is_meta:
                raise ValueError(f"{short} is not initialised: take the module from skeleton()")
            setattr(owner, short, buffer.to(device))

    def release(self, module: nn.Module) -> None:
        """Put the weights of a materialised module back on the meta device, freeing their memory."""
        for owner, short, _, is_buffer in _own_tensors(module, ""):
            empty = torch.empty_like(getattr(owner, short), device="meta")
            setattr(owner, short, empty if is_buffer else nn.Parameter(empty, requires_grad=False))

    def _reader(self, name: str) -> Callable[..., torch.Tensor]:
        """Reads tensors that a parameter is made of; what is stored in float64 is computed with in float32."""
        dtype = self.stored_dtype(name)
        return partial(self.checkpoint.read_finite, dtype=torch.float32 if dtype == torch.float64 else dtype)

    def _assembly(self, name: str) -> Assembly:
        if name not in self.parameters:
            raise ValueError(f"the model has no parameter {name}")
        return self.assemblies[self.parameters[name].tied_to or name]

    def _dtype(self, name: str, requested: torch.dtype) -> torch.dtype:
        fixed = self.dtype_rules.get(requested, self.dtype_rules[torch.float32]).get(name)
        if fixed is None or (requested == torch.float64 and fixed.is_floating_point):
            return requested
        return fixed

    def _load(self, name: str, requested: torch.dtype | None, device: torch.device | str) -> torch.Tensor:
        dtype = self._dtype(name, requested or self.dtype)
        if not self._assembly(name).stacks_experts:
            return self.read(name).to(device=device, dtype=dtype)
        shape = self.parameters[name].shape
        stack = torch.empty(shape, dtype=dtype, device=device)
        for expert in range(shape[0]):
            stack[expert] = self.read_expert(name, expert).to(dtype)
        return stack


def map_model(checkpoint: Checkpoint) -> ModelMap:
    """Map a checkpoint onto transformers' model of its config; no weight is read, only tables of expert ids are.

    Raises InputError for an unknown architecture or absurd sizes, tensors that are missing, or of another shape
    or kind (float or integer) than the config says, and tables that name experts which are not there.
    """
    file = checkpoint.folder / "config.json"
    config = build_config(checkpoint.config, file)
    require_plausible(config, [entry.shape for entry in checkpoint.tensors.values()], file)
    dtype = _model_dtype(config, checkpoint)
    model = build_meta_model(config, dtype, file)
    scales = set(checkpoint.scales.values())
    shapes = {name: checkpoint.dense_shape(name) for name in checkpoint.tensors if name not in scales}
    try:
        plan = plan_names(model, shapes)
    except InputError as error:
        raise InputError(
            error.message, file=checkpoint.folder, tensor=error.tensor, remedy=error.remedy
        ) from error
    ties, assemblies, warnings = resolve_ties(model, plan.assemblies, checkpoint)
    if ties.broken:
        config.tie_word_embeddings = False
    parameters = {}
    classified = classify(model)
    for name, (found, tensor) in classified.items():
        tied_to = ties.tied.get(name)
        sources = assemblies[tied_to or name].source_names if (tied_to or name) in assemblies else ()
        parameters[name] = Parameter(
            name,
            tuple(tensor.shape),
            found.role,
            found.compress,
            found.reason,
            sources,
            tied_to,
            found.buffer,
        )
        if tied_to is not None:
            parameters[name] = replace(
                parameters[name], compress=False, reason=f"tied to {tied_to}: stored there"
            )
    _require_complete(parameters, checkpoint)
    _require_shapes(parameters, assemblies, checkpoint)
    dtype_rules = {requested: _fixed_dtypes(model, dtype, requested) for requested in _MODEL_DTYPES}
    for parameter in parameters.values():
        _require_kind(parameter, dtype_rules[dtype].get(parameter.name, dtype), checkpoint)
    for name, experts in expert_tables(classified).items():
        require_experts(
            checkpoint.entry(parameters[name].sources[0]), experts, "download the checkpoint again"
        )
    notes, mtp, mtp_tensors = sort_unexpected(plan.unexpected, config, checkpoint)
    return ModelMap(
        checkpoint=checkpoint,
        config=config,
        dtype=dtype,
        parameters=parameters,
        layer_prefixes=layer_prefixes(model, config.get_text_config().num_hidden_layers),
        warnings=[*checkpoint.warnings, *warnings, *notes],
        mtp=mtp,
        mtp_tensors=mtp_tensors,
        assemblies=assemblies,
        dtype_rules=dtype_rules,
    )


def _own_tensors(module: nn.Module, prefix: str) -> Iterator[tuple[nn.Module, str, str, bool]]:
    for path, owner in list(module.named_modules(remove_duplicate=False)):
        base = f"{prefix}{path}." if path else prefix
        for short in list(owner._parameters):
            if owner._parameters[short] is not None:
                yield owner, short, base + short, False
        for short in list(owner._buffers):
            if owner._buffers[short] is not None and short not in owner._non_persistent_buffers_set:
                yield owner, short, base + short, True


def _transient_buffers(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for owner in list(module.modules()):
        for short in sorted(owner._non_persistent_buffers_set):
            buffer = owner._buffers.get(short)
            if buffer is not None:
                yield owner, short, buffer


def _model_dtype(config: PretrainedConfig, checkpoint: Checkpoint) -> torch.dtype:
    dtype = config.dtype
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), None)
    if dtype in _MODEL_DTYPES:
        return dtype
    for entry in checkpoint.tensors.values():
        stored = TORCH_DTYPES.get(entry.dtype)
        if stored in _MODEL_DTYPES and entry.name not in checkpoint.scales.values():
            return stored
    return torch.bfloat16


def _fixed_dtypes(model: Any, dtype: torch.dtype, requested: torch.dtype) -> dict[str, torch.dtype]:
    """Parameters whose dtype does not follow the `requested` one, as `from_pretrained` decides it.

    `dtype` is the one that the meta `model` was built in: parameters of another one chose it themselves.
    """
    plan = model._get_dtype_plan(requested)
    pattern, by_group, _ = build_glob_alternation(list(plan)) if plan else (None, {}, {})
    fixed = {}
    for name, tensor in model.state_dict().items():
        match = pattern.search(name) if pattern is not None else None
        if match is not None and match.lastgroup is not None:
            fixed[name] = plan[by_group[match.lastgroup]]
        elif tensor.dtype != dtype:
            fixed[name] = tensor.dtype
    return fixed


def _require_complete(parameters: dict[str, Parameter], checkpoint: Checkpoint) -> None:
    missing = [name for name, parameter in parameters.items() if not parameter.sources]
    if missing:
        raise InputError(
            f"{len(missing)} tensor(s) of the model are missing: {', '.join(missing[:3])}",
            file=checkpoint.folder,
            tensor=missing[0],
            remedy="download the checkpoint again; missing weights are never initialised",
        )


def _require_shapes(
    parameters: dict[str, Parameter], assemblies: dict[str, Assembly], checkpoint: Checkpoint
) -> None:
    for name, parameter in parameters.items():
        key = parameter.tied_to or name
        assembly = assemblies[key]
        stored = assembly.shapes.get(key, assembly.shapes[assembly.target])
        entry = checkpoint.tensors[parameter.sources[0]]
        if stored != parameter.shape:
            raise InputError(
                f"stored with shape {stored}, but config.json makes it {parameter.shape}",
                file=entry.file,
                tensor=entry.name,
                remedy="the weights and config.json do not belong together; download the checkpoint again",
            )


def _require_kind(parameter: Parameter, dtype: torch.dtype, checkpoint: Checkpoint) -> None:
    """Refuse numbers that the parameter's `dtype` cannot be read from."""
    for source in parameter.sources:
        entry = checkpoint.tensors[source]
        decoded = checkpoint.is_fp4(source) or checkpoint.is_fp8(source)
        if decoded and source not in checkpoint.scales:
            checkpoint.read_dense(source, (0, 0))  # refuses, naming the scales that it looked for
        if not holds(dtype, torch.float32 if decoded else TORCH_DTYPES[entry.dtype]):
            scale = " without a scale" if dtype.is_floating_point else ""
            raise InputError(
                f"stored as {entry.dtype}{scale}; the model has {str(dtype).removeprefix('torch.')} numbers here",
                file=entry.file,
                tensor=source,
                remedy="the number format is unknown: start from the original weights",
            )
