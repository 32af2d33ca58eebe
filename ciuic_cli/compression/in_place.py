"""`apply_ciuic_compression`: compresses a loaded transformers model in place."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, TypeVar, cast

from safetensors import safe_open
from torch import nn

from ciuic_cli.codecs import native
from ciuic_cli.compression.options import CompressOptions
from ciuic_cli.compression.pipeline import compress
from ciuic_cli.errors import UsageError
from ciuic_cli.process.signals import interruptible
from ciuic_cli.process.torch_modes import default_modes
from ciuic_cli.process.workers import is_distributed
from ciuic_cli.runtime.loading import pack_module_inplace

Model = TypeVar("Model", bound=nn.Module)


def apply_ciuic_compression(model: Model, tokenizer: Any = None, **options: Any) -> Model:
    """Compress a loaded transformers model in place and return it.

    Dense weights are replaced by compressed ones, module by module; references to the model stay valid. The weights
    pass through a temporary folder, which takes the bytes of the original and those of a run (`cost/forecast.py`). The
    call takes as long as `ciuic compress`; pass progress=lambda phase, done, total: ... to watch it.

    Args:
        model: a transformers causal language model with its weights on the CPU or a GPU.
        tokenizer: the model's tokenizer, for the calibration text; None: the tokenizer at its `name_or_path`.
        **options: as for `compress`, except dry_run, force and prompt: ratio, calibration, nsamples, effort, ...

    Raises:
        UsageError: no tokenizer, not a transformers model, or one with a PEFT adapter.
        TypeError: an option that `compress` does not have.
        CiuicError: as `compress`; the model is unchanged.
    """
    if not hasattr(model, "save_pretrained") or not hasattr(model, "config"):
        raise UsageError(
            "only transformers models can be compressed in place", remedy="pass a PreTrainedModel"
        )
    if _has_adapter(model):
        raise UsageError(
            "the model has a PEFT adapter, which would be lost",
            remedy="merge it first (model = model.merge_and_unload()), or compress the base model and add the adapter "
            "to the result",
        )
    if is_distributed():
        raise UsageError(
            "a model is compressed in place by one process, not under torchrun",
            remedy="compress its checkpoint with torchrun ... ciuic compress, and load the result everywhere",
        )
    if {"dry_run", "force", "prompt"} & options.keys():
        raise UsageError(
            "a model is compressed in place without dry_run, force and prompt", remedy="leave them out"
        )
    compress_options = {name: value for name, value in options.items() if name not in ("progress", "hint")}
    CompressOptions(**compress_options)  # wrong options are refused before the model is written
    native.interface()
    if tokenizer is None:
        tokenizer = _tokenizer_of(model)
    with (
        interruptible(resend=True),
        tempfile.TemporaryDirectory(prefix="ciuic-") as folder,
        default_modes(),
    ):
        source, out = Path(folder) / "source", Path(folder) / "out"
        cast(Any, model).save_pretrained(source)
        tokenizer.save_pretrained(source)
        report = compress(source, out, **options)
        blobs: dict[str, Any] = {}
        for file in sorted(out.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                compressed = {row.name for row in report.components if row.dense is None}
                blobs |= {name: tensors.get_tensor(name) for name in tensors.keys() if name in compressed}  # noqa: SIM118
        notes = {"bits_per_weight": report.bits_per_weight, "ratio": report.ratio}
        return cast(Model, pack_module_inplace(model, blobs, notes=notes))


def _has_adapter(model: nn.Module) -> bool:
    """Whether PEFT wraps the model or layers of it. A merged model may keep an attribute `peft_config`."""
    wrapped = any(kind.__name__ == "PeftModel" for kind in type(model).__mro__)
    return wrapped or any(hasattr(module, "base_layer") for module in model.modules())


def _tokenizer_of(model: Any) -> Any:
    from transformers import AutoTokenizer

    name = getattr(model, "name_or_path", "") or getattr(model.config, "name_or_path", "")
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UsageError(
            "the model's tokenizer was not found", remedy="pass it: apply_ciuic_compression(model, tokenizer)"
        ) from error
