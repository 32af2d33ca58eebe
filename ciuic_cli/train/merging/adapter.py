"""Loads an adapter in PEFT's format onto a model, and checks what PEFT passes over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ciuic_cli.checkpoint.folder import read_json
from ciuic_cli.checkpoint.formats import TORCH_DTYPES, count_nonfinite
from ciuic_cli.checkpoint.header import read_header
from ciuic_cli.errors import CiuicError, InputError
from ciuic_cli.process.memory import machine_fault
from ciuic_cli.runtime.loading import load
from ciuic_cli.train.merging.changes import Changes
from ciuic_cli.train.merging.patterns import require_prompt_patterns

ADAPTER_FILE = "adapter_model.safetensors"
"""PEFT's name of the file with the factors."""
CONFIG_FILE = "adapter_config.json"
"""PEFT's name of the file with the adapter's options."""
MOST_ADDED = 1e6
"""Largest norm of what an adapter may add to a matrix (chosen, far above any weight)."""
_REMEDY = "give the output of `ciuic train`, or another adapter that PEFT saved, unchanged"


def require_adapter(folder: Path) -> None:
    """Raise InputError if the folder has no adapter."""
    if not (folder / ADAPTER_FILE).is_file():
        raise InputError(
            f"there is no adapter: {ADAPTER_FILE} is missing",
            file=folder,
            remedy="give the output of `ciuic train`",
        )


def adapted_model(
    folder: Path, adapter: Path, device: str, open_base: Callable[[Path, str], Any] = load
) -> Any:
    """The model in `folder` with the LoRA adapter in the folder `adapter`, as a PeftModel in eval mode.

    Args:
        open_base: opens the model in `folder` on a device; default: an artifact.

    Raises InputError for files that are absent or damaged, an adapter of another kind, factors that are NaN or
    infinite, regular expressions that take too long, options that PEFT refuses, and factors that the model lacks or
    that the adapter lacks: PEFT would leave these out with a warning.
    """
    require_adapter(adapter)
    options = read_json(adapter, CONFIG_FILE, remedy=_REMEDY)
    kind = options.get("peft_type")
    if kind != "LORA":
        raise InputError(
            f"peft_type is {kind!r:.60}: only LoRA adapters are supported",
            file=adapter / CONFIG_FILE,
            remedy=_REMEDY,
        )
    stored = _checked_names(adapter / ADAPTER_FILE)
    model = open_base(folder, device)
    require_prompt_patterns(options, (name for name, _ in model.named_modules()), adapter / CONFIG_FILE)
    try:
        from peft import PeftModel, get_peft_model_state_dict

        adapted: Any = PeftModel.from_pretrained(model, adapter).eval()
        expected = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    except CiuicError:
        raise
    except Exception as error:  # PEFT checks hardly any option: anything may follow from a damaged one
        fault = machine_fault(error)
        if fault is not None:
            raise fault from error
        reason = " ".join(str(error).split())
        raise InputError(
            f"PEFT cannot load the adapter: {type(error).__name__}: {reason:.300}",
            file=adapter,
            remedy=_REMEDY,
        ) from error
    for names, what in (
        (stored - expected, "belong to no weight of the model with the options in adapter_config.json"),
        (expected - stored, "are missing"),
    ):
        if names:
            raise InputError(
                f"{len(names)} of the adapter's tensors {what}",
                file=adapter / ADAPTER_FILE,
                tensor=min(names),
                remedy="give the artifact on which the adapter was trained, and the adapter as it was saved",
            )
    return adapted


def require_moderate(changes: Changes, adapter: Path) -> None:
    """Raise InputError for an adapter that adds numbers that are NaN, infinite, or larger than any weight."""
    for name, parts in changes.items():
        for change in parts.values():
            norm = float(change.left.double().norm() * change.right.double().norm())
            if not norm <= MOST_ADDED:
                raise InputError(
                    f"it adds numbers with a norm of {norm:.3g} to a matrix: lora_alpha or the factors are damaged",
                    file=adapter / CONFIG_FILE,
                    tensor=name,
                    remedy=_REMEDY,
                )


def _checked_names(file: Path) -> set[str]:
    """The names of the tensors, whose values are all finite."""
    for name, entry in read_header(file).tensors.items():
        if entry.dtype not in TORCH_DTYPES or not TORCH_DTYPES[entry.dtype].is_floating_point:
            raise InputError(
                f"stored as {entry.dtype}: factors are floating-point numbers",
                file=file,
                tensor=name,
                remedy=_REMEDY,
            )
    tensors = load_file(file)
    for name, value in tensors.items():
        count = count_nonfinite(value.to(torch.float32))
        if count:
            raise InputError(
                f"{count} of {value.numel()} values are NaN or infinite",
                file=file,
                tensor=name,
                remedy=_REMEDY,
            )
    return set(tensors)
