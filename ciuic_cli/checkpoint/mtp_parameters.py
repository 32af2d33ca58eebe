"""`compress --mtp keep`: turns the tensors of multi-token-prediction layers into parameters of the `ModelMap`.

transformers' model has no place for them, so they keep their names and shapes from the checkpoint. They are read,
coded and counted like any other parameter. They have no predicted KL: the model's predictions do not depend on them.
"""

from __future__ import annotations

from dataclasses import replace

from ciuic_cli.checkpoint.formats import TORCH_DTYPES
from ciuic_cli.checkpoint.model_map import ModelMap, Parameter
from ciuic_cli.checkpoint.naming import Assembly
from ciuic_cli.checkpoint.roles import MTP_ROLES, classify_mtp
from ciuic_cli.checkpoint.tying import same_values
from ciuic_cli.errors import InputError

_STORABLE = ("BF16", "F16", "F32", "F64", "I32", "I64", "BOOL")
"""Dtypes that an artifact can store as they are."""


def keep_mtp(model_map: ModelMap) -> ModelMap:
    """A copy of the map with one parameter per tensor of `mtp_tensors`; the map itself if there are none.

    A copy of the model's embedding or head (DeepSeek-V3 ships one of each) is tied to it if all values are equal.
    Raises InputError for a tensor in an unknown number format.
    """
    if not model_map.mtp_tensors:
        return model_map
    kept = {name: _parameter(model_map, name) for name in model_map.mtp_tensors}
    assemblies = {
        name: Assembly(name, {name: (name,)}, None, {name: parameter.shape})
        for name, parameter in kept.items()
        if parameter.tied_to is None
    }
    checkpoint = model_map.checkpoint
    dtypes = {
        name: TORCH_DTYPES[checkpoint.entry(name).dtype]
        for name in assemblies
        if checkpoint.format_of(name) is None
    }
    return replace(
        model_map,
        parameters={**model_map.parameters, **kept},
        assemblies={**model_map.assemblies, **assemblies},
        dtype_rules={requested: {**rules, **dtypes} for requested, rules in model_map.dtype_rules.items()},
        mtp=replace(
            model_map.mtp,
            kept=True,
            stored=len(assemblies),
            shared={name: parameter.tied_to for name, parameter in kept.items() if parameter.tied_to},
        ),
    )  # fmt: skip


def is_mtp(parameter: Parameter) -> bool:
    """Whether a parameter belongs to a multi-token-prediction layer."""
    return parameter.role in MTP_ROLES


def _parameter(model_map: ModelMap, name: str) -> Parameter:
    checkpoint = model_map.checkpoint
    entry = checkpoint.entry(name)
    if checkpoint.format_of(name) is not None:
        checkpoint.read_decoded(name, (0, 0))  # raises InputError if the scale is absent
        floating = True
    elif entry.dtype in _STORABLE:
        floating = TORCH_DTYPES[entry.dtype].is_floating_point
    else:
        raise InputError(
            f"a tensor of a multi-token-prediction layer is stored as {entry.dtype}: the number format is unknown",
            file=entry.file,
            tensor=name,
            remedy="leave these layers out with --mtp drop",
        )
    shape = checkpoint.decoded_shape(name)
    original = _equal_embedding_or_head(model_map, name, shape)
    if original is not None:
        reason = f"equal to {original}: stored there"
        return Parameter(name, shape, "mtp", False, reason, (name,), tied_to=original)
    found = classify_mtp(name, shape, floating=floating)
    return Parameter(name, shape, found.role, found.compress, found.reason, (name,), buffer=found.buffer)


def _equal_embedding_or_head(model_map: ModelMap, name: str, shape: tuple[int, ...]) -> str | None:
    """The name of the model's embedding or head with the same stored values, or None."""
    checkpoint = model_map.checkpoint
    for parameter in model_map.parameters.values():
        if parameter.role not in ("embedding", "head") or parameter.tied_to or parameter.shape != shape:
            continue
        source = parameter.sources[0]
        if checkpoint.entry(source).dtype == checkpoint.entry(name).dtype and same_values(
            checkpoint, source, name
        ):
            return parameter.name
    return None
