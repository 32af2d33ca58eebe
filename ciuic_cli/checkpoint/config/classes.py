"""Which class of transformers loads a model, and which part of a model with several towers is its language model."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

_AUTO_CLASSES = (
    (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
)
"""transformers' auto classes of language models, each with the names of its models by model type; the first one is
preferred."""


def auto_class(config: PretrainedConfig) -> Any:
    """The auto class that loads the model of this config, or None: it has no language model that predicts text.

    Some configs have a class of each kind: Llama 4 with its vision tower, and its language model alone. Then
    `architectures` in config.json decides.
    """
    declared = config.architectures or ()
    known = [
        (auto, name) for auto, names in _AUTO_CLASSES if (name := names.get(config.model_type)) is not None
    ]
    return next((auto for auto, name in known if name in declared), known[0][0] if known else None)


def class_name(config: PretrainedConfig) -> str:
    """The name of the class that `auto_class` loads; of the config's class if there is none."""
    chosen = auto_class(config)
    names = [str(names[config.model_type]) for auto, names in _AUTO_CLASSES if auto is chosen]
    return names[0] if names else type(config).__name__


def language_model_prefix(model: Any) -> str:
    """Name prefix of the language model's parameters in a model with other towers; "" if all of it is one.

    The head may have another prefix.
    """
    config = getattr(model, "config", None)
    if config is None or config.get_text_config() is config:
        return ""
    decoder = model.get_decoder()
    name = next((name for name, module in model.named_modules() if module is decoder), "")
    return f"{name}." if name else ""
