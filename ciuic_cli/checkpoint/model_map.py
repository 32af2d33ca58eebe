"""A checkpoint as parameters of transformers' model: `map_model` takes a `Checkpoint` and returns a `ModelMap`.

Mapping needs the config and the headers only (and reads tables of expert ids, if there are any). The map then reads one
parameter, one expert or one row range at a time. `materialise` fills a module of the model, usually one decoder layer,
with its weights and `release` frees them; the result equals a full `from_pretrained` bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from ciuic_cli.checkpoint.architecture import (
    UNSCALED,
    build_config,
    build_meta_model,
    fixed_dtypes,
    initialise_buffers,
    layer_prefixes,
    require_plausible,
    stored_tensors,
    transient_buffers,
)
from ciuic_cli.checkpoint.compressible import file_shape
from ciuic_cli.checkpoint.config.dtypes import MODEL_DTYPES, model_dtype
from ciuic_cli.checkpoint.expert_ids import expert_tables, require_expert_table
from ciuic_cli.checkpoint.formats import TORCH_DTYPES, can_hold
from ciuic_cli.checkpoint.mtp import COUNT_KEY, PredictionLayers, sort_unexpected
from ciuic_cli.checkpoint.naming import Assembly, map_names
from ciuic_cli.checkpoint.reader import Checkpoint
from ciuic_cli.checkpoint.roles import TOWER, classify
from ciuic_cli.checkpoint.tying import resolve_ties
from ciuic_cli.errors import InputError


@dataclass(frozen=True)
class Parameter:
    """One parameter or persistent buffer of the model.

    Attributes:
        shape: as it is stored in an artifact; the model's parameter has the last two sizes exchanged if `transposed`.
        role, compress, reason, transposed, used_by: as in `roles.Classification`.
        sources: names of the checkpoint's tensors that it is made of.
        tied_to: the parameter whose values it shares. A tied parameter is stored and counted only there.
        buffer: whether it is a buffer (a router's bias, a lookup table): stored, but not counted as a parameter.
    """

    name: str
    shape: tuple[int, ...]
    role: str
    compress: bool
    reason: str
    sources: tuple[str, ...]
    tied_to: str | None = None
    buffer: bool = False
    transposed: bool = False
    used_by: str | None = None

    @property
    def is_stack(self) -> bool:
        """True if the parameter is compressed and is a stack of experts' matrices."""
        return self.compress and len(self.shape) == 3

    def in_memory(self, value: torch.Tensor) -> torch.Tensor:
        """A stored value, or one expert of it, in the orientation of the model's parameter, or the other way round."""
        return value.mT if self.transposed else value

    @property
    def memory_shape(self) -> tuple[int, ...]:
        """The shape of the model's parameter."""
        return tuple(self.in_memory(torch.empty(self.shape, device="meta")).shape)

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())


@dataclass(frozen=True)
class ModelMap:
    """A checkpoint and transformers' model of it. `map_model` builds it.

    Attributes:
        dtype: the model's dtype, from its config or its weights.
        parameters: by in-memory name, in the model's order.
        layer_prefixes: name prefixes of the decoder layers ("model.layers.0.").
        warnings: messages for the user.
        mtp: the checkpoint's multi-token-prediction layers.
        mtp_tensors: names of their tensors, which `mtp_parameters.keep_mtp` turns into parameters.
        assemblies: how each stored parameter is built from tensors of the checkpoint.
        dtype_rules: requested dtype -> parameter -> dtype, for the parameters that get another dtype.
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
        """Number of weights of the model. Tied weights count once; buffers do not count."""
        return sum(
            parameter.numel
            for parameter in self.parameters.values()
            if parameter.tied_to is None and not parameter.buffer
        )

    @property
    def fixed_dtypes(self) -> dict[str, torch.dtype]:
        """Name -> dtype, for the parameters and buffers that do not have the model's `dtype` in memory."""
        return self.dtype_rules[self.dtype]

    def memory_dtype(self, name: str) -> torch.dtype:
        """The dtype of a parameter or buffer in memory, if the model is loaded in its own dtype."""
        return self.fixed_dtypes.get(name, self.dtype)

    def stored_dtype(self, name: str) -> torch.dtype:
        """The dtype of an uncompressed parameter or buffer in an artifact.

        It is the checkpoint's, so that a model that is loaded in float32 has all digits of a norm in float32. Tensors
        that transformers makes of tensors of several dtypes or of FP8, and towers, which are large, have the dtype in
        memory.
        """
        parameter = self.parameters[name]
        found = {self.checkpoint.tensors[source].dtype for source in parameter.sources}
        stored = TORCH_DTYPES.get(found.pop()) if len(found) == 1 else None
        decoded = any(self.checkpoint.format_of(source) is not None for source in parameter.sources)
        if stored not in MODEL_DTYPES or decoded or parameter.role == TOWER:
            return self.memory_dtype(name)
        return stored

    @property
    def source_config(self) -> dict[str, Any]:
        """The config.json for an artifact of this map.

        It is the checkpoint's without `auto_map` and `quantization_config`, and with the model's dtype.
        `tie_word_embeddings` is false if the values differ, and dropped multi-token-prediction layers are not counted.
        """
        dropped = ("auto_map", "quantization_config")
        values = {key: value for key, value in self.checkpoint.config.items() if key not in dropped}
        if not getattr(self.config, "tie_word_embeddings", True) and values.get("tie_word_embeddings", True):
            values["tie_word_embeddings"] = False
        values |= {key: value for key, value in UNSCALED.items() if hasattr(self.config, key)}
        if values.get(COUNT_KEY) and not self.mtp.kept:
            values[COUNT_KEY] = 0
        if not (values.get("dtype") or values.get("torch_dtype")):
            # Without it transformers takes the dtype from the first file, which may hold only compressed blobs.
            values["dtype"] = str(self.dtype).removeprefix("torch.")
        return values

    @cached_property
    def _conversion_model(self) -> Any:
        return self.meta_model()

    def meta_model(self, **options: Any) -> Any:
        """A new model on the meta device. `options` as in `build_meta_model`."""
        return build_meta_model(self.config, self.dtype, **options)

    def skeleton(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu", **options: Any
    ) -> Any:
        """A new meta model, but with real non-persistent buffers (rotary frequencies, ...) on `device`."""
        model = build_meta_model(self.config, dtype or self.dtype, **options)
        initialise_buffers(model, device)
        return model

    def read(self, name: str) -> torch.Tensor:
        """A parameter in its stored shape, in the checkpoint's dtype; float32 if it had scales.

        An expert stack is read as a whole; prefer `read_expert` for large stacks. `read`, `read_expert` and `read_rows`
        raise InputError for a value that is NaN or infinite, or becomes so in the model's dtype.
        """
        assembly, parameter = self._assembly(name), self.parameters[name]
        if assembly.stacks_experts:
            return torch.stack([self.read_expert(name, expert) for expert in range(parameter.shape[0])])
        if assembly.converter is None:
            value = self._reader(name)(assembly.source_names[0])
            return parameter.in_memory(value.reshape(parameter.memory_shape))
        return parameter.in_memory(assembly.build(self._reader(name), self._conversion_model)[name])

    def read_expert(self, name: str, expert: int) -> torch.Tensor:
        """One expert (out, in) of a fused stack. Other experts are read only if a converter needs them."""
        assembly, parameter = self._assembly(name), self.parameters[name]
        if len(parameter.shape) != 3 or not 0 <= expert < parameter.shape[0]:
            raise ValueError(f"{name} of shape {parameter.shape} has no expert {expert}")
        if assembly.stacks_experts:
            parts = [self._reader(name)(source) for source in assembly.expert_sources(expert)]
            return parameter.in_memory(torch.cat(parts))
        if assembly.converter is None:
            shape = parameter.memory_shape[1:]
            rows = 1 if len(assembly.shapes[assembly.target]) == 3 else shape[0]  # of a flat matrix
            value = self._reader(name)(assembly.source_names[0], (expert * rows, (expert + 1) * rows))
            return parameter.in_memory(value.reshape(shape))
        return self.read(name)[expert].clone()

    def read_rows(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Rows [begin, end) of a matrix. Unless `stores_rows`, this reads the whole matrix."""
        if self.stores_rows(name):
            return self._reader(name)(self._assembly(name).source_names[0], (begin, end))
        return self.read(name)[begin:end].clone()

    def stores_rows(self, name: str) -> bool:
        """True if the checkpoint stores the matrix as it is. Then `read_rows` reads only the rows that it returns."""
        return self._assembly(name).converter is None and not self.parameters[name].transposed

    def materialise(
        self,
        module: nn.Module,
        prefix: str,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        *,
        weight_dtypes: Mapping[type[nn.Module], torch.dtype] | None = None,
        stack_dtype: torch.dtype | None = None,
        stack_device: torch.device | str | None = None,
        values: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Fill `module` with its weights, in place. It is the submodule of a `skeleton` at the name `prefix`.

        Weights are converted to `dtype` (default: the model's), except those that transformers keeps in another one,
        and require no gradient. `weight` of a module whose class is a key of `weight_dtypes` gets the dtype there,
        expert stacks get `stack_dtype` and `stack_device`, if given. Non-persistent buffers move to `device`. Raises
        ValueError if they are on the meta device, as in a module of `meta_model`.

        values: other values for parameters, by the name under which these are stored; what is stored is not read. A
            value that has the wanted dtype and device becomes the parameter itself, without a copy.
        """
        loaded: dict[str, torch.Tensor] = {}
        for owner, short, name, is_buffer in stored_tensors(module, prefix):
            key = self.parameters[name].tied_to or name
            if key not in loaded:
                is_stack = self.parameters[key].is_stack
                of_class = short == "weight" and (weight_dtypes or {}).get(type(owner))
                wanted = (is_stack and stack_dtype) or of_class or dtype
                value = self.load(
                    name, wanted, (is_stack and stack_device) or device, (values or {}).get(key)
                )
                loaded[key] = value if is_buffer else nn.Parameter(value, requires_grad=False)
            setattr(owner, short, loaded[key])
        for owner, short, buffer in transient_buffers(module):
            if buffer.is_meta:
                raise ValueError(f"{short} is not initialised: take the module from skeleton()")
            setattr(owner, short, buffer.to(device))

    def release(self, module: nn.Module) -> None:
        """Replace the weights of a materialised module by meta tensors, which frees their memory."""
        for owner, short, _, is_buffer in stored_tensors(module, ""):
            empty = torch.empty_like(getattr(owner, short), device="meta")
            setattr(owner, short, empty if is_buffer else nn.Parameter(empty, requires_grad=False))

    def _reader(self, name: str) -> Callable[..., torch.Tensor]:
        """A function that reads the parameter's source tensors and checks them in its dtype (float32 for float64)."""
        dtype = self.memory_dtype(name)
        return partial(self.checkpoint.read_finite, dtype=torch.float32 if dtype == torch.float64 else dtype)

    def _assembly(self, name: str) -> Assembly:
        if name not in self.parameters:
            raise ValueError(f"the model has no parameter {name}")
        return self.assemblies[self.parameters[name].tied_to or name]

    def _dtype(self, name: str, requested: torch.dtype) -> torch.dtype:
        """The dtype in which `from_pretrained(dtype=requested)` would load the parameter; also for float64."""
        fixed = self.dtype_rules.get(requested, self.dtype_rules[torch.float32]).get(name)
        if fixed is None or (requested == torch.float64 and fixed.is_floating_point):
            return requested
        return fixed

    def load(
        self,
        name: str,
        requested: torch.dtype | None,
        device: torch.device | str,
        value: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A parameter as in the model. value: in its stored shape; None: read it."""
        dtype = self._dtype(name, requested or self.dtype)
        parameter = self.parameters[name]
        if value is not None or not self._assembly(name).stacks_experts:
            value = self.read(name) if value is None else value
            return parameter.in_memory(value).to(device=device, dtype=dtype).contiguous()
        shape = parameter.memory_shape
        stack = torch.empty(shape, dtype=dtype, device=device)
        for expert in range(shape[0]):
            stack[expert] = parameter.in_memory(self.read_expert(name, expert)).to(dtype)
        return stack


def map_model(checkpoint: Checkpoint) -> ModelMap:
    """Map a checkpoint onto transformers' model of its config. No weights are read, only tables of expert ids.

    Raises InputError for an unknown architecture or implausible sizes, for tensors that are missing or have another
    shape or kind (float or integer) than the config says, and for expert ids outside the layer's experts.
    """
    file = checkpoint.folder / "config.json"
    config = build_config(checkpoint.config, file)
    require_plausible(config, [entry.shape for entry in checkpoint.tensors.values()], file)
    dtype = model_dtype(config, checkpoint)
    model = build_meta_model(config, dtype, file)
    scales = set(checkpoint.scales.values())
    shapes = {name: checkpoint.decoded_shape(name) for name in checkpoint.tensors if name not in scales}
    try:
        names = map_names(model, shapes)
    except InputError as error:
        raise InputError(
            error.message, file=checkpoint.folder, tensor=error.tensor, remedy=error.remedy
        ) from error
    ties, assemblies, warnings = resolve_ties(model, names.assemblies, checkpoint)
    if ties.broken:
        config.tie_word_embeddings = False
    parameters = {}
    classified = classify(model)
    for name, (classification, tensor) in classified.items():
        tied_to = ties.tied.get(name)
        sources = assemblies[tied_to or name].source_names if (tied_to or name) in assemblies else ()
        shape = tuple(tensor.shape)
        parameters[name] = Parameter(name, shape, sources=sources, tied_to=tied_to, **vars(classification))
        if tied_to is not None:
            parameters[name] = replace(
                parameters[name], compress=False, reason=f"tied to {tied_to}: stored there"
            )
    _require_complete(parameters, checkpoint)
    _require_shapes(model, parameters, assemblies, checkpoint)
    dtype_rules = {requested: fixed_dtypes(model, dtype, requested) for requested in MODEL_DTYPES}
    for parameter in parameters.values():
        _require_kind(parameter, dtype_rules[dtype].get(parameter.name, dtype), checkpoint)
    for name, experts in expert_tables(classified).items():
        require_expert_table(
            checkpoint.entry(parameters[name].sources[0]), experts, "download the checkpoint again"
        )
    unexpected_warnings, mtp, mtp_tensors = sort_unexpected(names.unexpected, config, checkpoint)
    return ModelMap(
        checkpoint=checkpoint,
        config=config,
        dtype=dtype,
        parameters=parameters,
        layer_prefixes=layer_prefixes(model, getattr(config.get_text_config(), "num_hidden_layers", 0)),
        warnings=[*checkpoint.warnings, *warnings, *unexpected_warnings],
        mtp=mtp,
        mtp_tensors=mtp_tensors,
        assemblies=assemblies,
        dtype_rules=dtype_rules,
    )


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
    model: Any, parameters: dict[str, Parameter], assemblies: dict[str, Assembly], checkpoint: Checkpoint
) -> None:
    for name, parameter in parameters.items():
        key = parameter.tied_to or name
        assembly = assemblies[key]
        stored = assembly.shapes.get(key, assembly.shapes[assembly.target])
        entry = checkpoint.tensors[parameter.sources[0]]
        expected = parameter.memory_shape
        in_files = file_shape(model, name, expected)
        if stored not in (expected, in_files):
            raise InputError(
                f"stored with shape {stored}, but config.json makes it {in_files}",
                file=entry.file,
                tensor=entry.name,
                remedy="the weights and config.json do not belong together; download the checkpoint again",
            )


def _require_kind(parameter: Parameter, dtype: torch.dtype, checkpoint: Checkpoint) -> None:
    """Raise InputError if the stored numbers cannot be read as the parameter's `dtype`."""
    for source in parameter.sources:
        entry = checkpoint.tensors[source]
        decoded = checkpoint.format_of(source) is not None
        if decoded and source not in checkpoint.scales:
            checkpoint.read_decoded(source, (0, 0))  # raises InputError, which names the expected scales
        if not can_hold(dtype, torch.float32 if decoded else TORCH_DTYPES[entry.dtype]):
            scale = " without a scale" if dtype.is_floating_point else ""
            raise InputError(
                f"stored as {entry.dtype}{scale}; the model has {str(dtype).removeprefix('torch.')} numbers here",
                file=entry.file,
                tensor=source,
                remedy="the number format is unknown: start from the original weights",
            )
