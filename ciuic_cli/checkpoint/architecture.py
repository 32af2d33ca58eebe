"""From a config.json to transformers' own model, without weights and without anyone else's code.

The configuration class comes from transformers' registry by `model_type`; `auto_map`, which names Python
files of the checkpoint, is dropped before anything sees it. The model is built on the meta device, where
weights have shapes and no memory.
"""

from __future__ import annotations

import copy
import math
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ciuic_cli.errors import CiuicError, InputError
from ciuic_cli.process.memory import machine_fault

_MAX_LAYERS = 4096
_MAX_EXPERTS = 65_536
_MAX_WIDTH = 1 << 26
_POSITIVE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_POSITION_KEYS = ("max_position_embeddings", "n_positions")
_MAX_POSITIONS = 1 << 32
_LAYER_KEYS = (
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "num_nextn_predict_layers",
    "first_k_dense_replace",
)
_LABEL_KEYS = ("num_labels", "n_labels")
_LOOP_WORDS = ("_iter", "loops")
_MAX_LOOPS = 4096
_MAX_NUMBER = 1 << 40
"""Beyond every whole number in the config.json of a model; rotary bases, the largest, come to some 5e10."""
_UNBOUNDED = ("model_max_length",)
"""Where the tokenizers of transformers write 1e30 for "no limit"."""
_EXPERT_KEYS = (
    "n_routed_experts",
    "num_experts",
    "num_local_experts",
    "n_shared_experts",
    "num_experts_per_tok",
)
_EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")
_WIDTH_WORDS = ("size", "dim", "heads", "rank", "vocab", "n_embd", "n_inner", "n_head", "mult")
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
_MAX_TOKEN = 2**31 - 1
_FEW = 64
"""So many layers or experts are believed without asking the files."""
_IGNORED = ("auto_map", "quantization_config", "transformers_version", "_name_or_path", "return_dict")


def build_config(raw: dict[str, Any], file: Path | None = None) -> PretrainedConfig:
    """The transformers configuration of a config.json dict, without `auto_map` and `quantization_config`.

    Raises InputError for an unknown architecture, sizes that are negative or absurd, and whatever
    transformers' own validation refuses; EnvironmentFault without a temporary folder, or memory.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        code = "; its own Python code (auto_map) is never executed" if raw.get("auto_map") else ""
        raise InputError(
            f"unknown architecture: model_type {model_type!r:.60} is not in transformers{code}",
            file=file,
            remedy="update transformers, or use a checkpoint of a supported architecture",
        )
    _check_sizes(raw, CONFIG_MAPPING[model_type], file)
    _check_numbers(raw, file)
    values = {key: copy.deepcopy(value) for key, value in raw.items() if key not in _IGNORED}
    try:
        config = CONFIG_MAPPING[model_type].from_dict(values)
    except Exception as error:
        raise _refused("transformers refuses the configuration", error, file) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(
            f"model_type {model_type!r:.60} has no causal language model in transformers",
            file=file,
            remedy="only decoder-only language models can be compressed",
        )
    if getattr(config, "is_encoder_decoder", False):
        _absurd("is_encoder_decoder", True, "false: only decoders can be compressed", file)
    _check_routing(config, file)
    return config


def require_plausible(
    config: PretrainedConfig, shapes: Sequence[tuple[int, ...]], file: Path | None = None
) -> None:
    """Refuse more layers or experts than tensors of these shapes can hold, before modules are built for them.

    Every layer has a tensor of its own; experts have one each, or are rows of one.
    Raises InputError naming the key in config.json.
    """
    text = config.get_text_config()
    possible = {
        "num_hidden_layers": len(shapes),
        **dict.fromkeys(_EXPERT_KEYS, max([len(shapes), *(shape[0] for shape in shapes if shape)])),
    }
    for key, limit in possible.items():
        value = getattr(text, key, None)
        if isinstance(value, int) and value > max(limit, _FEW):
            raise InputError(
                f"config.json has {key} = {value}, but the files hold only {len(shapes)} tensors",
                file=file,
                remedy="the weights and config.json do not belong together; download the checkpoint again",
            )


def build_meta_model(
    config: PretrainedConfig, dtype: torch.dtype, file: Path | None = None, **options: Any
) -> nn.Module:
    """The causal language model of `config` on the meta device, floating weights in `dtype`, in eval mode.

    `options` go to `AutoModelForCausalLM.from_config` (attn_implementation, experts_implementation).
    Raises InputError if the model cannot be built from the configuration; EnvironmentFault as `build_config` does.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), dtype=dtype, trust_remote_code=False, **options
            )
    except Exception as error:
        raise _refused("no model can be built from the configuration", error, file) from error
    return model.eval()


def initialise_buffers(model: Any, device: torch.device | str = "cpu") -> None:
    """Give the non-persistent buffers of a meta model (rotary frequencies, ...) their values, in place.

    The steps are those of `from_pretrained`: empty buffers on `device`, then the model's own initialisation
    of everything that is not marked as loaded. The weights, still on the meta device, are marked.
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
        # Building on the meta device has already run the initialisation once, without effect.
        if hasattr(module, "_is_hf_initialized"):
            del module._is_hf_initialized
    model.initialize_weights()


def layer_prefixes(model: Any, count: int) -> list[str]:
    """Names of the decoder layers in order, each with its trailing dot ("model.layers.0.")."""
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not lists:
        return []
    # The decoder's list is the outermost one; a one-layer model may have others of the same length inside.
    name, module = min(
        lists, key=lambda item: (item[0].count("."), -sum(p.numel() for p in item[1].parameters()))
    )
    return [f"{name}.{index}." for index in range(len(module))]


def _check_numbers(raw: dict[str, Any], file: Path | None) -> None:
    """No whole number, however deep, that overflows what is computed from it, and none that is no number (a list may
    end in infinity: some models' limits do)."""
    waiting = [(key, value) for key, value in raw.items() if key not in (*_IGNORED, *_UNBOUNDED)]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.items()
        elif isinstance(value, list):
            waiting += [(key, part) for part in value if not isinstance(part, float)]
        elif isinstance(value, int) and abs(value) > _MAX_NUMBER:
            _absurd(key, value, f"between -{_MAX_NUMBER} and {_MAX_NUMBER}", file)
        elif isinstance(value, float) and not math.isfinite(value):
            _absurd(key, value, "a finite number", file)


def _check_sizes(raw: dict[str, Any], kind: type[PretrainedConfig], file: Path | None) -> None:
    """Bounds by what the key says it counts; steps of a loop only where the `kind` of configuration has the key."""
    sections = [raw] + [
        value for key, value in raw.items() if key.endswith("_config") and isinstance(value, dict)
    ]
    for section in sections:
        require_token_ids(section, file)
        for key, value in section.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                if key in _POSITIVE and value is not None:
                    _absurd(key, value, "a number", file)
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
            least = 1 if key in _POSITIVE or key in _POSITION_KEYS else 0
            if not least <= value <= limit:
                _absurd(key, value, f"between {least} and {limit}", file)


def require_token_ids(values: dict[str, Any], file: Path | None = None) -> None:
    """Refuse special tokens, in a config.json or generation_config.json, of which torch can make no tensor.

    -1 is an old way to write that there is none, and some models end with a token behind their vocabulary's last.
    Raises InputError naming the key.
    """
    for key in _TOKEN_KEYS:
        value = values.get(key)
        for token in value if isinstance(value, list) else [value]:
            if token is not None and not (type(token) is int and -1 <= token <= _MAX_TOKEN):
                raise InputError(
                    f"{key} is {value!r:.60}, which must be null, a token's number, or a list of such",
                    file=file,
                    remedy="correct it, or download the file again",
                )


def positions_of(config: PretrainedConfig) -> int | None:
    """Tokens of the longest text that the model was made for; None where its config does not say."""
    text = config.get_text_config()
    found = (getattr(text, key, None) for key in _POSITION_KEYS)
    return next((value for value in found if isinstance(value, int)), None)


def _check_routing(config: PretrainedConfig, file: Path | None) -> None:
    """Experts per token and groups of experts that fit the experts; transformers finds out while it runs."""
    text = config.get_text_config()
    experts = next(
        (getattr(text, key) for key in _EXPERT_COUNTS if isinstance(getattr(text, key, None), int)), None
    )
    chosen, groups = getattr(text, "num_experts_per_tok", None), getattr(text, "n_group", None)
    best = getattr(text, "topk_group", None)
    if not experts:
        return
    if isinstance(chosen, int) and not 1 <= chosen <= experts:
        _absurd("num_experts_per_tok", chosen, f"between 1 and the number of experts, {experts}", file)
    if isinstance(groups, int) and (groups < 1 or experts % groups):
        _absurd("n_group", groups, f"a divisor of the number of experts, {experts}", file)
    if isinstance(groups, int) and isinstance(best, int) and not 1 <= best <= groups:
        _absurd("topk_group", best, f"between 1 and n_group, {groups}", file)


def _absurd(key: str, value: object, expected: str, file: Path | None) -> None:
    raise InputError(
        f"config.json has {key} = {value!r:.60}, which must be {expected}",
        file=file,
        remedy="download config.json again",
    )


@contextmanager
def running_as_configured(file: Path, module: str | None = None) -> Iterator[None]:
    """For running transformers' own code on weights as they are stored: what it cannot do with the sizes and choices
    in config.json becomes an InputError that names the file, and the module if it is known.

    What the compressed modules of an artifact's model raise is no fault of the file, and stays as it is.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if _of_compressed_modules(error):
            raise
        raise _refused("transformers cannot run the model", error, file, module) from error


def _of_compressed_modules(error: Exception) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__", "").startswith("ciuic_cli.runtime.") for frame, _ in frames)


def _refused(what: str, error: Exception, file: Path | None, module: str | None = None) -> CiuicError:
    """The fault behind an error of transformers: the machine's, or else that of config.json."""
    fault = machine_fault(error)
    if fault is not None and getattr(error, "errno", True):  # transformers' own OSErrors have no number
        return fault
    reason = " ".join(str(error).split())
    return InputError(
        f"{what}: {type(error).__name__}: {reason:.300}",
        file=file,
        tensor=module,
        remedy="download config.json again, or update transformers",
    )
