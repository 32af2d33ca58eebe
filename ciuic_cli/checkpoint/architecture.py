"""From config.json to transformers' model, without weights and without code from the checkpoint.

`build_config` takes the content of a config.json, checks its sizes and returns transformers' configuration, found by
`model_type` in transformers' registry. `auto_map`, which names Python files of the checkpoint, is left out. The
model of `build_meta_model` is on the meta device, where weights have shapes but no memory.
"""

from __future__ import annotations

import copy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.core_model_loading import build_glob_alternation

from ciuic_cli.checkpoint.compressible import stack_flat_experts
from ciuic_cli.checkpoint.config.classes import auto_class, class_name, language_model_prefix
from ciuic_cli.checkpoint.config.numbers import (
    EXPERT_KEYS,
    IGNORED_KEYS,
    check_numbers,
    check_routing,
    check_sizes,
    refuse_value,
)
from ciuic_cli.errors import CiuicError, EnvironmentFault, InputError
from ciuic_cli.process.memory import machine_fault

_UNCHECKED_COUNT = 64
"""Up to this number, layers and experts are not compared with the stored tensors. Chosen, not tuned."""
UNSCALED = {"rescale_every": 0}
"""Settings with which a class leaves the weights in memory as they are stored. RWKV otherwise halves some of them, and
the activations between its layers, so that float16 does not overflow; the predictions are the same."""

_CHECK_CONFIG = "download config.json again, or update transformers"
_CHECK_MODEL = (
    "the installed transformers does not run this model as its config.json describes it: try another version of "
    "transformers; if you edited config.json, compare it with the original's"
)


def build_config(raw: dict[str, Any], file: Path | None = None) -> PretrainedConfig:
    """transformers' configuration for the content `raw` of a config.json, without `auto_map` and `quantization_config`.

    `file` is named in errors. Raises InputError for an unknown architecture, for sizes that are negative or
    implausible, and for what transformers' own validation refuses; EnvironmentFault if memory or a temporary folder is
    missing.
    """
    _require_docstrings()
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        code = "; its own Python code (auto_map) is never executed" if raw.get("auto_map") else ""
        raise InputError(
            f"unknown architecture: model_type {model_type!r:.60} is not in transformers{code}",
            file=file,
            remedy="update transformers, or use a checkpoint of a supported architecture",
        )
    raw = PretrainedConfig._decode_special_floats(raw)
    check_sizes(raw, CONFIG_MAPPING[model_type], file)
    check_numbers(raw, file)
    values = {key: copy.deepcopy(value) for key, value in raw.items() if key not in IGNORED_KEYS}
    kind = CONFIG_MAPPING[model_type]
    values |= {key: value for key, value in UNSCALED.items() if hasattr(kind, key)}
    try:
        config = kind.from_dict(values)
    except Exception as error:
        raise _converted("transformers refuses the configuration", error, file, _CHECK_CONFIG) from error
    if auto_class(config) is None:
        raise InputError(
            f"model_type {model_type!r:.60} has no causal language model in transformers",
            file=file,
            remedy="only decoder-only language models can be compressed, alone or with towers for images or sound",
        )
    if getattr(config, "is_encoder_decoder", False):
        refuse_value("is_encoder_decoder", True, "false: only decoder models can be compressed", file)
    check_routing(config, file)
    return config


def _require_docstrings() -> None:
    """Raise EnvironmentFault under `python -OO`, which removes docstrings: transformers reads its own."""
    if sys.flags.optimize > 1:
        raise EnvironmentFault(
            "transformers does not work in Python without docstrings (python -OO, or PYTHONOPTIMIZE=2)",
            remedy="run it without -OO and unset PYTHONOPTIMIZE",
        )


def require_plausible(
    config: PretrainedConfig, shapes: Sequence[tuple[int, ...]], file: Path | None = None
) -> None:
    """Check the numbers of layers and experts against the shapes of the stored tensors, before the model is built.

    Every layer needs at least one tensor. Every expert needs a tensor, or a row of one.
    Raises InputError, which names the key in config.json.
    """
    text = config.get_text_config()
    possible = {
        "num_hidden_layers": len(shapes),
        **dict.fromkeys(EXPERT_KEYS, max([len(shapes), *(shape[0] for shape in shapes if shape)])),
    }
    for key, limit in possible.items():
        value = getattr(text, key, None)
        if isinstance(value, int) and value > max(limit, _UNCHECKED_COUNT):
            raise InputError(
                f"config.json has {key} = {value}, but the files hold only {len(shapes)} tensors",
                file=file,
                remedy="the weights and config.json do not belong together; download the checkpoint again",
            )


def build_meta_model(
    config: PretrainedConfig, dtype: torch.dtype, file: Path | None = None, **options: Any
) -> nn.Module:
    """The language model of `config` on the meta device, in eval mode, with floating weights in `dtype`.

    Flat matrices of experts are stacks in it (`compressible.stack_flat_experts`).
    `options` go to `from_config` of its auto class (attn_implementation, experts_implementation).
    Raises InputError if transformers cannot build the model; EnvironmentFault as `build_config` does.
    """
    chosen = auto_class(config)
    try:
        with torch.device("meta"):
            model = chosen.from_config(copy.deepcopy(config), dtype=dtype, trust_remote_code=False, **options)
    except Exception as error:
        folder = None if file is None else file.parent
        raise _converted(
            f"transformers cannot build {class_name(config)}", error, folder, _CHECK_MODEL
        ) from error
    stack_flat_experts(model)
    return model.eval()


def initialise_buffers(model: Any, device: torch.device | str = "cpu") -> None:
    """Compute the non-persistent buffers of a meta model (rotary frequencies, ...) on `device`, in place.

    The steps are those of `from_pretrained`: allocate the buffers, then run the model's own initialisation for
    everything that is not marked as loaded. The weights, which stay on the meta device, are marked.
    """
    for name, buffer in list(model.named_buffers()):
        owner_name, _, short = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        if short in owner._non_persistent_buffers_set:
            setattr(owner, short, torch.empty_like(buffer, device=device))
        else:
            buffer._is_hf_initialized = True
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    for module in model.modules():
        # Building the model marked every module as initialised, but that had no effect on the meta device.
        if hasattr(module, "_is_hf_initialized"):
            del module._is_hf_initialized
    model.initialize_weights()


def layer_prefixes(model: Any, count: int) -> list[str]:
    """Names of the decoder layers in order, with a trailing dot ("model.layers.0."). Empty if the model has no list.

    count: of layers in the config. Some models count otherwise: LongCat-Flash counts two for each of its layers.
    """
    prefix = language_model_prefix(model)
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and name.startswith(prefix)
    ]
    if not lists:
        return []
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in lists}
    # A one-layer model may have other lists of the same length inside its layer. The decoder's list is the outermost
    # one, and the largest of several outermost ones.
    matching = [item for item in lists if len(item[1]) == count]
    largest = max(lists, key=lambda item: sizes[item[0]])
    name, module = min(matching or [largest], key=lambda item: (item[0].count("."), -sizes[item[0]]))
    if 2 * sizes[name] < sizes[largest[0]]:
        name, module = largest
    return [f"{name}.{index}." for index in range(len(module))]


def fixed_dtypes(model: Any, dtype: torch.dtype, requested: torch.dtype) -> dict[str, torch.dtype]:
    """Name -> dtype, for the parameters that `from_pretrained(dtype=requested)` loads in another dtype.

    The meta `model` was built in `dtype`: a parameter of another dtype has a fixed one.
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


def stored_tensors(module: nn.Module, prefix: str) -> Iterator[tuple[nn.Module, str, str, bool]]:
    """(owner, attribute, full name, whether it is a buffer) of all parameters and persistent buffers.

    `prefix` is the name of `module` in the model, with a trailing dot. Tensors may be replaced during the iteration.
    """
    for path, owner in list(module.named_modules(remove_duplicate=False)):
        base = f"{prefix}{path}." if path else prefix
        for short in list(owner._parameters):
            if owner._parameters[short] is not None:
                yield owner, short, base + short, False
        for short in list(owner._buffers):
            if owner._buffers[short] is not None and short not in owner._non_persistent_buffers_set:
                yield owner, short, base + short, True


def transient_buffers(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """(owner, attribute, tensor) of all non-persistent buffers, which no checkpoint holds."""
    for owner in list(module.modules()):
        for short in sorted(owner._non_persistent_buffers_set):
            buffer = owner._buffers.get(short)
            if buffer is not None:
                yield owner, short, buffer


@contextmanager
def config_faults(file: Path, module: str | None = None) -> Iterator[None]:
    """Convert errors of transformers' code in the block, which runs the model, to an InputError.

    It names the function that failed, the folder of `file`, which is the config.json, and `module` if given. Errors of
    an artifact's compressed modules pass unchanged: the model does not cause them.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if _is_from_compressed_module(error):
            raise
        what = "transformers cannot run the model"
        raise _converted(what, error, file.parent, _CHECK_MODEL, module) from error


def _is_from_compressed_module(error: Exception) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__", "").startswith("ciuic_cli.runtime.") for frame, _ in frames)


def _converted(
    what: str, error: Exception, file: Path | None, remedy: str, module: str | None = None
) -> CiuicError:
    """An error of transformers as our own: an EnvironmentFault if the machine is the cause, else an InputError."""
    fault = machine_fault(error)
    if fault is not None and getattr(error, "errno", True):  # an OSError of transformers itself has no number
        return fault
    reason = " ".join(str(error).split())
    function = _failed_function(error)
    place = "" if function is None else f" in {function}"
    return InputError(
        f"{what}: {type(error).__name__}{place}: {reason:.300}", file=file, tensor=module, remedy=remedy
    )


def _failed_function(error: Exception) -> str | None:
    """Class and name of the innermost function of a model in transformers that the error passed; None without one."""
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").startswith("transformers.models."):
            found = frame.f_code.co_qualname
    return found
