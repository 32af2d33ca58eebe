"""The transformers quantizer: how `from_pretrained` builds a model around an artifact's blobs.

transformers builds the dense model on the meta device, lets the quantizer replace modules, and then fills parameters
by name. The quantizer reads and checks the blobs' headers and puts in modules whose parameters have the names and
sizes in the files, so neither loading nor saving converts anything. This module imports transformers;
`registration` decides when it is imported.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ciuic_cli.artifact.reader import (
    check_format,
    read_blobs,
    require_counted,
    require_dense,
    require_expert_ids,
)
from ciuic_cli.artifact.schema import FORMAT_VERSION, QUANT_METHOD
from ciuic_cli.checkpoint.compressible import stack_flat_experts
from ciuic_cli.checkpoint.expert_ids import expert_tables
from ciuic_cli.checkpoint.mtp import COUNT_KEY, PredictionLayers
from ciuic_cli.checkpoint.roles import classify
from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.errors import InputError, UsageError
from ciuic_cli.process.memory import reuse_activations
from ciuic_cli.process.threads import renew_pool
from ciuic_cli.runtime.experts import CompressedExperts
from ciuic_cli.runtime.mixed_classes import adapt_model
from ciuic_cli.runtime.modules import CompressedEmbedding, CompressedLinear
from ciuic_cli.runtime.placement.crossing import compute_in_place, keep_weights_in_place
from ciuic_cli.runtime.routing import mask_router, pruned_experts, routers
from ciuic_cli.runtime.swap import blob_slots, swap_modules
from ciuic_cli.runtime.views.viewed_modules import ViewedModule

_NOT_SAVED = ("checksums", "mtp", "dequantize")
"""Fields of the config that describe the folder's files or how it was loaded. A saved copy does not inherit them."""


class CiuicConfig(QuantizationConfigMixin):
    """The `quantization_config` of an artifact: method, format version, and the fields that `compress` wrote.

    As an argument of `from_pretrained` only `dequantize` counts: with True, the weights are decoded, and the model is
    an ordinary dense one.

    Raises:
        InputError: the format is newer than this version of ciuic.
    """

    def __init__(
        self,
        format_version: int = FORMAT_VERSION,
        quant_method: str = QUANT_METHOD,
        dequantize: bool = False,
        **notes: Any,
    ) -> None:
        check_format({"quant_method": quant_method, "format_version": format_version})
        self.dequantize = dequantize
        self.quant_method = quant_method  # type: ignore[assignment]
        self.format_version = format_version
        for name, value in notes.items():
            setattr(self, name, value)

    def get(self, name: str, default: Any = None) -> Any:
        """A field or the default: transformers treats a loaded config like the dictionary in config.json."""
        return getattr(self, name, default)

    def get_loading_attributes(self) -> dict[str, Any]:
        """The fields that an argument of `from_pretrained` may set."""
        return {"dequantize": self.dequantize}

    def to_dict(self) -> dict[str, Any]:
        """All fields except those of `_NOT_SAVED`."""
        return {k: copy.deepcopy(v) for k, v in self.__dict__.items() if k not in _NOT_SAVED}


class CiuicQuantizer(HfQuantizer):
    """Loads artifacts of `ciuic compress` and leaves their weights compressed; see the module's docstring."""

    requires_calibration = True
    pruned: Mapping[str, torch.Tensor] | None = None
    """Name of the experts module -> mask (E,) of its pruned experts, as read from the files; None before loading."""
    dtype: torch.dtype | None = None
    """Of activations and dense weights; None before loading."""

    def _process_model_before_weight_loading(
        self,
        model: Any,
        checkpoint_files: list[str] | None = None,
        dtype: torch.dtype | None = None,
        **_: Any,
    ) -> Any:
        if not checkpoint_files:
            raise UsageError(
                "a ciuic artifact is loaded from its files, not from a state dict",
                remedy="call from_pretrained with the folder and without state_dict",
            )
        renew_pool()  # transformers fills the parameters in several threads
        artifact = read_blobs([Path(file) for file in checkpoint_files])
        stack_flat_experts(model)
        expected = model.state_dict()
        prefix = getattr(model, "base_model_prefix", "")
        in_model = {name: _name_in_model(name, expected, prefix) for name in artifact.tensors}
        _refuse_missing(model, expected, in_model.values(), Path(checkpoint_files[0]).parent)
        present = {
            name: expected[model_name] for name, model_name in in_model.items() if model_name in expected
        }
        unknown = [name for name in in_model if name not in present]
        require_counted(artifact, unknown, present, _predictors(self.quantization_config))
        require_dense(artifact, present)
        tables = expert_tables(classify(model))
        require_expert_ids(
            artifact,
            {name: tables[model_name] for name, model_name in in_model.items() if model_name in tables},
        )
        blobs = {in_model[name]: blob for name, blob in artifact.blobs.items() if in_model[name] in expected}
        self.dtype = dtype or torch.get_default_dtype()
        swap_modules(model, blob_slots(model, blobs), self.dtype)
        # Read from the files now, because parameters of offloaded layers will stay on the meta device.
        self.pruned = {}
        for name, blob in blobs.items():
            if len(blob.shape) == 3 and name.endswith(".down_proj"):
                with blob.matrices() as experts:
                    self.pruned[name.removesuffix(".down_proj")] = pruned_experts(experts)
        _ignore_predictors(model, _predictors(self.quantization_config))
        return model

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        if getattr(self.quantization_config, "dequantize", False):
            return self._dequantize(model, self.dtype)
        in_memory = keep_weights_in_place(model)
        finish_modules(model, self.pruned, self.dtype)
        compute_in_place(model, in_memory)
        reuse_activations()
        return model

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        """Called by `model.dequantize(dtype)`, in place; default: the model's dtype."""
        from ciuic_cli.runtime.views.dequantizing import dequantize

        pruned = pruned_in_memory(model) if self.pruned is None else self.pruned
        dequantize(model, dtype or model.dtype, pruned)
        return model

    def update_weight_conversions(self, weight_conversions: list, model: Any = None) -> list:
        """No conversions: an artifact's tensors have the names and shapes that the model has in memory.

        transformers remembers the list, so `save_pretrained` converts nothing either.
        """
        return []

    def get_state_dict_and_metadata(
        self, model: Any
    ) -> tuple[dict[str, torch.Tensor] | None, dict[str, str]]:
        """Called by `save_pretrained` before it writes the config.

        A model in memory has no multi-token-prediction layers, so the copy's config declares none. Warns if the
        artifact had kept them.
        """
        if getattr(model.config, COUNT_KEY, None):
            setattr(model.config, COUNT_KEY, 0)
        if _predictors(self.quantization_config).kept:
            warnings.warn(
                "the saved copy has no multi-token-prediction layers: they were kept in the artifact's files, but "
                "transformers does not load them. To copy an artifact with them, copy its folder",
                stacklevel=3,
            )
        return super().get_state_dict_and_metadata(model)

    def is_serializable(self, safe_serialization: bool | None = None) -> bool:
        """`save_pretrained` writes the blobs as they are."""
        return True

    @property
    def is_trainable(self) -> bool:
        """transformers' Trainer asks this, and besides for an adapter: the codes themselves have no gradient."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Products and lookups are torch.library operators with fake implementations."""
        return True


def finish_modules(
    model: Any, pruned: Mapping[str, torch.Tensor] | None = None, dtype: torch.dtype | None = None
) -> None:
    """Last steps that need the parameters: views of weights, biases, router masks, the model's dtype.

    Args:
        model: after loading, or after its modules were replaced in place.
        pruned: name of the experts module -> mask (E,) of its pruned experts; default: from the blobs in the modules.
        dtype: that dense weights of linears would have; default: the embedding rows' or the model's.
    """
    if pruned is None:
        pruned = pruned_in_memory(model)
    if dtype is None:
        dtype = _dtype_of(model)
    for name, module in model.named_modules():
        if isinstance(module, ViewedModule | CompressedEmbedding):
            module.present()
        if not isinstance(module, CompressedLinear):
            continue
        # transformers keeps the weight of an indexer in float32 and casts the input to `weight.dtype`.
        module.present(torch.float32 if name.endswith("indexer.weights_proj") else dtype)
        if module.bias is not None and module.bias.numel() > module.out_features:
            # Tying pads a head's bias to the length of the weight's first dimension, which here counts bytes.
            module.bias.data = module.bias.data[: module.out_features].clone()
    for router, mask in routers(model, pruned):
        mask_router(router, mask)
    adapt_model(model)
    from ciuic_cli.runtime.attention.indexer import adapt_indexers  # transformers is whole only now
    from ciuic_cli.runtime.attention.mla import adapt_latent_attention
    from ciuic_cli.runtime.attention.prompts import adapt_prompt_attention
    from ciuic_cli.runtime.attention.shared_keys import adapt_shared_keys

    adapt_latent_attention(model)
    adapt_indexers(model)
    adapt_shared_keys(model)
    adapt_prompt_attention(model)
    from ciuic_cli.runtime.decoding.layer import adapt_decoder_layers
    from ciuic_cli.runtime.decoding.step import adapt_layer_stacks

    adapt_decoder_layers(model)
    adapt_layer_stacks(model)


def pruned_in_memory(model: Any) -> dict[str, torch.Tensor]:
    """Name of the experts module -> mask (E,) of its pruned experts, from the blobs of a model in memory."""
    return {
        name: pruned_experts(ExpertStack.from_buffer(module.down_proj.data.cpu(), where=name).experts)
        for name, module in model.named_modules()
        if isinstance(module, CompressedExperts)
    }


def _dtype_of(model: Any) -> torch.dtype:
    for module in model.modules():
        if isinstance(module, CompressedEmbedding):
            return module.dtype_of_rows.dtype
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())


def mark_compressed(model: Any, notes: dict[str, Any] | None = None) -> None:
    """Give a model whose modules were replaced in place the state of one that `from_pretrained` loaded.

    `save_pretrained` then writes an artifact. Other models than those of transformers are not changed.

    Args:
        notes: fields of the artifact's `quantization_config`, for example `bits_per_weight`.
    """
    if not hasattr(model, "save_pretrained"):
        return
    config = CiuicConfig(**(notes or {}))
    quantizer = CiuicQuantizer(config, pre_quantized=True)
    model._weight_conversions = []
    model.hf_quantizer = quantizer
    model.quantization_method = config.quant_method
    model.is_quantized = True
    quantizer.postprocess_model(model)


def register_with_transformers() -> None:
    """Add the quantization method to transformers' mappings. Idempotent."""
    if QUANT_METHOD not in auto.AUTO_QUANTIZATION_CONFIG_MAPPING:
        auto.register_quantization_config(QUANT_METHOD)(CiuicConfig)
    if QUANT_METHOD not in auto.AUTO_QUANTIZER_MAPPING:
        auto.register_quantizer(QUANT_METHOD)(CiuicQuantizer)
    # transformers merges loading attributes only for the classes in this tuple, and has no way to register one.
    registry: Any = auto
    if CiuicConfig not in registry.LOADING_ATTRIBUTES_CONFIG_TYPES:
        registry.LOADING_ATTRIBUTES_CONFIG_TYPES += (CiuicConfig,)


def _name_in_model(name: str, expected: dict[str, torch.Tensor], prefix: str) -> str:
    """The model's name for a stored tensor: a bare `LlamaModel` lacks the `model.` of `LlamaForCausalLM`."""
    if name in expected or not prefix:
        return name
    shorter = name.removeprefix(f"{prefix}.")
    if shorter in expected:
        return shorter
    longer = f"{prefix}.{name}"
    return longer if longer in expected else name


def _predictors(config: QuantizationConfigMixin) -> PredictionLayers:
    """The multi-token-prediction layers of the original model, whether or not the artifact's files keep them."""
    return PredictionLayers.from_dict(getattr(config, "mtp", None))


def _ignore_predictors(model: Any, mtp: PredictionLayers) -> None:
    """Stop transformers from reporting kept multi-token-prediction layers as unexpected tensors.

    transformers itself ignores them only at the layer numbers of the released models.
    """
    if mtp.kept:
        patterns = {rf"^{re.escape(layer.name)}\." for layer in mtp.layers}
        model._keys_to_ignore_on_load_unexpected = {
            *(model._keys_to_ignore_on_load_unexpected or ()),
            *patterns,
        }


def _refuse_missing(
    model: Any, expected: dict[str, torch.Tensor], stored: Iterable[str], folder: Path
) -> None:
    """Raise InputError if a tensor of the artifact's model is missing: transformers would initialise it at random.

    A head that the artifact's model does not have, such as a classifier's, begins at random, with transformers'
    warning.
    """
    present = set(stored)
    for target, source in model.all_tied_weights_keys.items():
        if target in present or source in present:
            present |= {target, source}
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    missing = sorted(
        name
        for name in expected
        if name not in present
        and not any(pattern.search(name) for pattern in ignored)
        and not _is_new_head(model, name)
    )
    if missing:
        raise InputError(
            f"{len(missing)} tensor(s) of the model are missing, the first: {', '.join(missing[:3])}",
            file=folder,
            remedy="the artifact is incomplete or belongs to another model; compress it again",
        )


def _is_new_head(model: Any, name: str) -> bool:
    """Whether the parameter belongs to a head that a language model does not have.

    It lies outside the part that all models of a family share, and the model predicts no tokens.
    """
    shared = f"{model.base_model_prefix}."
    has_shared_part = any(other.startswith(shared) for other in model.state_dict())
    return has_shared_part and not name.startswith(shared) and model.get_output_embeddings() is None


register_with_transformers()
