"""From config.json to transformers' model, without weights and without code from the checkpoint.

`build_config` takes the content of a config.json, checks its sizes and returns transformers' configuration, found by
`model_type` in transformers' registry. `auto_map`, which names Python files of the checkpoint, is left out. The
model of `build_meta_model` is on the meta device, where weights have shapes but no memory.
"""

from __future__ import annotations

import copy
import math
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig
from transformers.core_model_loading import build_glob_alternation
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ciuic_cli.errors import CiuicError, EnvironmentFault, InputError
from ciuic_cli.process.memory import machine_fault

# Limits of the numbers in a config.json, by what a key counts. They are chosen: far above any real model, and so low
# that a model at the limit is checked and built in little time and memory.
_MAX_LAYERS = 4096
_LAYER_KEYS = (
    "num_hidden_layers", "n_layer", "num_layers", "num_nextn_predict_layers", "first_k_dense_replace",
)  # fmt: skip
_MAX_EXPERTS = 65_536
"""Highest number of experts, and of labels."""
_EXPERT_COUNT_KEYS = ("n_routed_experts", "num_experts", "num_local_experts")
_EXPERT_KEYS = (*_EXPERT_COUNT_KEYS, "n_shared_experts", "num_experts_per_tok")
_LABEL_KEYS = ("num_labels", "n_labels")
_MAX_POSITIONS = 1 << 32
_POSITION_KEYS = ("max_position_embeddings", "n_positions")
_MAX_LOOPS = 4096
_LOOP_WORDS = ("_iter", "loops")
"""Parts of keys that count iterations of a loop in the model's code."""
_MAX_WIDTH = 1 << 26
_WIDTH_WORDS = ("size", "dim", "heads", "rank", "vocab", "n_embd", "n_inner", "n_head", "mult")
"""Parts of keys that are dimensions of weights."""
_MAX_MAGNITUDE = 1 << 40
"""Highest absolute value of any integer. The largest integers in real models are rotary bases, about 5e10."""
_UNLIMITED_KEYS = ("model_max_length",)
"""Keys without that limit: transformers' tokenizers write 1e30 for "no limit"."""
_MAX_TOKEN = 2**31 - 1
"""Highest token id: the largest 32-bit integer."""
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
_POSITIVE_KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Keys that must be at least 1."""
_DTYPE_KEYS = ("dtype", "torch_dtype")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes in which transformers loads a model."""
_UNCHECKED_COUNT = 64
"""Up to this number, layers and experts are not compared with the stored tensors. Chosen, not tuned."""
_IGNORED_KEYS = ("auto_map", "quantization_config", "transformers_version", "_name_or_path", "return_dict")
"""Keys that do not describe the architecture; they are neither checked nor passed on."""

_CHECK_CONFIG = "download config.json again, or update transformers"
_CHECK_MODEL = (
    "compare config.json with the original's; if it is intact, the installed transformers does not support this model: "
    "try another version"
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
    _check_sizes(raw, CONFIG_MAPPING[model_type], file)
    _check_numbers(raw, file)
    values = {key: copy.deepcopy(value) for key, value in raw.items() if key not in _IGNORED_KEYS}
    try:
        config = CONFIG_MAPPING[model_type].from_dict(values)
    except Exception as error:
        raise _converted("transformers refuses the configuration", error, file, _CHECK_CONFIG) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(
            f"model_type {model_type!r:.60} has no causal language model in transformers",
            file=file,
            remedy="only decoder-only language models can be compressed",
        )
    if getattr(config, "is_encoder_decoder", False):
        _refuse_value("is_encoder_decoder", True, "false: only decoder models can be compressed", file)
    _check_routing(config, file)
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
        **dict.fromkeys(_EXPERT_KEYS, max([len(shapes), *(shape[0] for shape in shapes if shape)])),
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
    """The causal language model of `config` on the meta device, in eval mode, with floating weights in `dtype`.

    `options` go to `AutoModelForCausalLM.from_config` (attn_implementation, experts_implementation).
    Raises InputError if transformers cannot build the model; EnvironmentFault as `build_config` does.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), dtype=dtype, trust_remote_code=False, **options
            )
    except Exception as error:
        name = getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "__name__", type(config).__name__)
        folder = None if file is None else file.parent
        raise _converted(f"transformers cannot build {name}", error, folder, _CHECK_MODEL) from error
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
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
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


def _check_numbers(raw: dict[str, Any], file: Path | None) -> None:
    """Refuse integers, at any depth, that overflow later computations, and NaN and infinity outside lists.

    Lists may contain infinity: some models write open limits that way.
    """
    pending = [(key, value) for key, value in raw.items() if key not in (*_IGNORED_KEYS, *_UNLIMITED_KEYS)]
    while pending:
        key, value = pending.pop()
        if isinstance(value, dict):
            pending += value.items()
        elif isinstance(value, list):
            pending += [(key, part) for part in value if not isinstance(part, float)]
        elif isinstance(value, int) and abs(value) > _MAX_MAGNITUDE:
            _refuse_value(key, value, f"between -{_MAX_MAGNITUDE} and {_MAX_MAGNITUDE}", file)
        elif isinstance(value, float) and not math.isfinite(value):
            _refuse_value(key, value, "a finite number", file)


def _check_sizes(raw: dict[str, Any], kind: type[PretrainedConfig], file: Path | None) -> None:
    """Check sizes against limits, chosen by what each key counts. Loop keys count only if the class `kind` has them."""
    sections = [raw] + [
        value for key, value in raw.items() if key.endswith("_config") and isinstance(value, dict)
    ]
    for section in sections:
        require_token_ids(section, file)
        _check_dtype(section, file)
        for key, value in section.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                if key in _POSITIVE_KEYS and value is not None:
                    _refuse_value(key, value, "a number", file)
                continue
            if key in _LAYER_KEYS:
                limit = _MAX_LAYERS
            elif key in _EXPERT_KEYS or key in _LABEL_KEYS:
                limit = _MAX_EXPERTS
            elif key in _POSITION_KEYS:
                limit = _MAX_POSITIONS
            elif any(word in key for word in _LOOP_WORDS) and hasattr(kind, key):
                limit = _MAX_LOOPS
            elif any(word in key for word in (*_WIDTH_WORDS, "group")) and "token" not in key:
                limit = _MAX_WIDTH
            else:
                continue
            # With one position nothing can be predicted.
            minimum = 2 if key in _POSITION_KEYS else 1 if key in _POSITIVE_KEYS else 0
            if not minimum <= value <= limit:
                _refuse_value(key, value, f"between {minimum} and {limit}", file)


def _check_dtype(section: dict[str, Any], file: Path | None) -> None:
    """Refuse a dtype in which transformers does not load a model. None is allowed: the weights decide."""
    for key in _DTYPE_KEYS:
        value = section.get(key)
        if value is not None and not (isinstance(value, str) and getattr(torch, value, None) in _DTYPES):
            raise InputError(
                f"config.json has {key} = {value!r:.60}, in which transformers loads no model",
                file=file,
                remedy=f"set {key} to bfloat16, float16 or float32, or download config.json again",
            )


def require_token_ids(values: dict[str, Any], file: Path | None = None) -> None:
    """Check the special token ids of a config.json or generation_config.json: they must fit a torch tensor.

    -1 is allowed: old configs write it for "none". Ids beyond the vocabulary are allowed: some models have them.
    Raises InputError, which names the key.
    """
    for key in _TOKEN_KEYS:
        value = values.get(key)
        for token in value if isinstance(value, list) else [value]:
            if token is not None and not (type(token) is int and -1 <= token <= _MAX_TOKEN):
                raise InputError(
                    f"{key} is {value!r:.60}, which must be null, a token id, or a list of token ids",
                    file=file,
                    remedy="correct it, or download the file again",
                )


def max_positions(config: PretrainedConfig) -> int | None:
    """Length in tokens of the longest text that the model supports; None if its config does not state it."""
    text = config.get_text_config()
    values = (getattr(text, key, None) for key in _POSITION_KEYS)
    return next((value for value in values if isinstance(value, int)), None)


def _check_routing(config: PretrainedConfig, file: Path | None) -> None:
    """Check experts per token and expert groups against the experts: transformers would fail only in the forward."""
    text = config.get_text_config()
    experts = next(
        (getattr(text, key) for key in _EXPERT_COUNT_KEYS if isinstance(getattr(text, key, None), int)), None
    )
    per_token, groups = getattr(text, "num_experts_per_tok", None), getattr(text, "n_group", None)
    top_groups = getattr(text, "topk_group", None)
    if not experts:
        return
    if isinstance(per_token, int) and not 1 <= per_token <= experts:
        _refuse_value(
            "num_experts_per_tok", per_token, f"between 1 and the number of experts, {experts}", file
        )
    if isinstance(groups, int) and (groups < 1 or experts % groups):
        _refuse_value("n_group", groups, f"a divisor of the number of experts, {experts}", file)
    if isinstance(groups, int) and isinstance(top_groups, int) and not 1 <= top_groups <= groups:
        _refuse_value("topk_group", top_groups, f"between 1 and n_group, {groups}", file)


def _refuse_value(key: str, value: object, expected: str, file: Path | None) -> None:
    raise InputError(
        f"config.json has {key} = {value!r:.60}, which must be {expected}",
        file=file,
        remedy="download config.json again",
    )


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
