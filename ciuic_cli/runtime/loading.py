"""Loads an artifact as a transformers model (`ciuic_cli.load`), or puts compressed weights into a loaded model."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ciuic_cli.artifact.reader import open_artifact
from ciuic_cli.checkpoint.folder import locate
from ciuic_cli.codecs import native
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.errors import CiuicError, EnvironmentFault, InputError, UsageError
from ciuic_cli.integers import parse_size
from ciuic_cli.process.memory import exhaustion
from ciuic_cli.runtime.swap import BlobSlot, swap_modules

if TYPE_CHECKING:
    from ciuic_cli.runtime.placement.choice import Placement

Blob = torch.Tensor | np.ndarray | bytes


def load(
    path: str | Path,
    device: str | torch.device = "auto",
    dtype: torch.dtype | str | None = None,
    *,
    verify: bool = False,
    gpu_memory: int | str | None = None,
    hint: Callable[[str], None] | None = None,
) -> Any:
    """Load an artifact of `ciuic compress`. Its weights stay compressed in memory.

    Args:
        path: the artifact's folder, or a hub id.
        device: "auto" (a GPU if there is one, else the CPU), "cpu", "cuda" or "cuda:N".
        dtype: dtype of activations and uncompressed tensors; default: the one in the artifact's config.
        verify: first compare every file with its checksum, as `ciuic inspect --verify` does.
        gpu_memory: most bytes of weights on the GPU, such as "20GB" or 20_000_000_000. What does not fit, routed
            experts first, stays in main memory and is computed there; only hidden states cross. The KV cache and
            activations take memory besides. Needs accelerate. Default: everything is on `device`.
        hint: receives a sentence that says what lies where; default: it goes to stderr.

    Returns:
        The transformers model (a PreTrainedModel with a language-model head), in evaluation mode. With `gpu_memory`,
        `hf_device_map` is its placement.

    Raises:
        InputError: `path` is no artifact, or the artifact is incomplete, damaged or of a newer format.
        EnvironmentFault: the device does not exist, or its memory or the machine's memory is exhausted; accelerate is
            missing.
        UsageError: `device` is not the name of a device; `gpu_memory` is no size, too small, or given without a GPU.
    """
    target = choose_device(device)
    limit = None if gpu_memory is None else _checked_limit(gpu_memory, target)
    if verify:
        from ciuic_cli.artifact.verification import verify as verify_files

        verify_files(path).require_intact(locate(path))
    if limit is not None:
        placement = _placement(path, limit, target, dtype)
        (hint or _to_stderr)(placement.summary)
        return _from_pretrained(path, torch.device("cpu"), dtype, device_map=dict(placement.device_map))
    model = _from_pretrained(path, target, dtype)
    return model if target.type == "cpu" else model.to(target)


def _checked_limit(gpu_memory: int | str, target: torch.device) -> int:
    """The bytes of the option `gpu_memory`. Raises UsageError, or EnvironmentFault, as `load` does."""
    limit = parse_size(gpu_memory) if isinstance(gpu_memory, str) else gpu_memory
    if isinstance(limit, bool) or not isinstance(limit, int) or limit <= 0:
        raise UsageError(
            f"gpu_memory={gpu_memory!r} is not a positive number of bytes",
            remedy='give a size like "20GB" or 20_000_000_000',
        )
    if target.type == "cpu":
        raise UsageError(
            "gpu_memory needs a GPU, and the model is to be loaded on the CPU",
            remedy='leave gpu_memory out, or give device="cuda"',
        )
    if importlib.util.find_spec("accelerate") is None:
        raise EnvironmentFault("gpu_memory needs accelerate", remedy="pip install accelerate")
    return limit


def _placement(
    path: str | Path, limit: int, target: torch.device, dtype: torch.dtype | str | None
) -> Placement:
    from ciuic_cli.checkpoint.architecture import build_config, build_meta_model
    from ciuic_cli.runtime.placement.choice import choose, measure

    artifact = open_artifact(path)
    config = build_config(artifact.config, artifact.folder / "config.json")
    model = build_meta_model(config, torch.float32, artifact.folder / "config.json")
    itemsize = dtype.itemsize if isinstance(dtype, torch.dtype) else 0
    nbytes = {
        name: entry.nbytes if name in artifact.blobs else max(entry.nbytes, math.prod(entry.shape) * itemsize)
        for name, entry in artifact.tensors.items()
        if not artifact.mtp.owns(name)  # transformers does not load multi-token-prediction layers
    }
    weights = measure(model, config.get_text_config().num_hidden_layers, nbytes)
    return choose(model, weights, limit, str(target))


def _to_stderr(sentence: str) -> None:
    print(sentence, file=sys.stderr)


def load_offloaded(
    path: str | Path,
    places: Mapping[str, str],
    offload_folder: Path,
    dtype: torch.dtype | None = None,
) -> Any:
    """As `load`, but with some modules left on disk, from where each is read when it runs.

    Args:
        places: module or parameter -> device or "disk", for all of the model; transformers' `device_map`.
        offload_folder: for what accelerate writes.
    """
    return _from_pretrained(
        path, torch.device("cpu"), dtype, device_map=dict(places), offload_folder=str(offload_folder)
    )


def _from_pretrained(
    path: str | Path, target: torch.device, dtype: torch.dtype | str | None, **options: Any
) -> Any:
    """The artifact as transformers' `from_pretrained` loads it, with errors as `load` raises them."""
    artifact = open_artifact(path)
    if target.type == "cpu":
        native.interface()
    from ciuic_cli.checkpoint.architecture import build_config, require_plausible
    from ciuic_cli.checkpoint.config.classes import auto_class
    from ciuic_cli.runtime.registration import register

    register()
    config_file = artifact.folder / "config.json"
    config = build_config(artifact.config, config_file)
    require_plausible(config, artifact.shapes, config_file)
    chosen: Any = auto_class(config)
    try:
        return chosen.from_pretrained(
            artifact.folder,
            dtype="auto" if dtype is None else dtype,
            trust_remote_code=False,
            use_safetensors=True,
            **options,
        )
    except InputError as error:
        raise InputError(
            error.message, file=error.file or artifact.folder, tensor=error.tensor, remedy=error.remedy
        ) from error
    except CiuicError:
        raise
    except Exception as error:  # a damaged config or generation_config makes transformers raise anything
        fault = exhaustion(error)
        if fault is not None:
            raise fault from error
        reason = " ".join(str(error).split())
        raise InputError(
            f"transformers cannot load the artifact: {type(error).__name__}: {reason:.300}",
            file=artifact.folder,
            remedy="check it with `ciuic inspect --verify`; fetch or compress it again",
        ) from error


def pack_module_inplace(
    model: nn.Module, blobs: Mapping[str, Blob], *, notes: Mapping[str, Any] | None = None
) -> nn.Module:
    """Replace modules of a loaded model by compressed ones, in place.

    Every new module is put on the device of the parameter that it replaces.

    Args:
        model: any nn.Module; a transformers model can be saved as an artifact afterwards.
        blobs: parameter name -> blob (bytes, or a uint8 tensor or array (nbytes,)): a PackedMatrix for a 2-D
            parameter, an ExpertStack for a 3-D one. Of two tied parameters one needs a blob.
        notes: fields for the `quantization_config` of a transformers model, such as `bits_per_weight`.

    Returns:
        The same model.

    Raises:
        InputError: a blob is damaged, the model lacks the parameter, the shapes differ, or the module cannot hold
            codes. The model may then be partly changed.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    dtype = next((p.dtype for p in parameters.values() if p.is_floating_point()), torch.get_default_dtype())
    slots: dict[str, BlobSlot] = {}
    for name, blob in blobs.items():
        tensor = _as_tensor(blob)
        device = parameters[name].device if name in parameters else torch.device("cpu")
        slots[name] = BlobSlot(_shape(tensor, name), tensor.to(device))
    ties: dict[str, str] = {}
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if parameters.get(target) is not parameters.get(source):
            continue
        with_blob = [name for name in (target, source) if name in slots]
        if len(with_blob) == 1:
            without_blob = source if with_blob[0] == target else target
            slots[without_blob] = slots[with_blob[0]]
            ties[without_blob] = with_blob[0]
    swap_modules(model, slots, dtype)
    for name, tied_to in ties.items():
        module_name, _, parameter = name.rpartition(".")
        setattr(model.get_submodule(module_name), parameter, model.get_parameter(tied_to))
    if hasattr(model, "save_pretrained"):
        from ciuic_cli.runtime.plugin import finish_modules, mark_compressed

        finish_modules(model)
        mark_compressed(model, dict(notes or {}))
    return model


def choose_device(device: str | torch.device) -> torch.device:
    """The device that a `--device` option names; "auto" is a GPU if there is one, else the CPU.

    Raises:
        UsageError: not the name of a device.
        EnvironmentFault: torch does not see the device.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"{device!r} is not a device", remedy="use auto, cpu, cuda or cuda:N") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise EnvironmentFault(
            "torch sees no CUDA device here", remedy="use --device cpu, or install a CUDA build of torch"
        )
    count = torch.cuda.device_count() if chosen.type == "cuda" else 0
    if chosen.type == "cuda" and (chosen.index or 0) >= count:
        raise EnvironmentFault(
            f"there is no device {chosen}; torch sees {count} CUDA device(s)",
            remedy=f"use cuda:0 to cuda:{count - 1}",
        )
    return chosen


def _as_tensor(blob: Blob) -> torch.Tensor:
    if isinstance(blob, torch.Tensor):
        return blob
    if isinstance(blob, np.ndarray):
        return torch.from_numpy(blob)
    return torch.frombuffer(bytearray(blob), dtype=torch.uint8)


def _shape(blob: torch.Tensor, name: str) -> tuple[int, ...]:
    """Shape of the dense weight that a blob decodes to. Raises InputError if the blob is damaged."""
    if bytes(blob[:4].tolist()) == b"CIUX":
        stack = ExpertStack.from_buffer(blob, where=name)
        return len(stack.experts), stack.rows, stack.cols
    matrix = PackedMatrix.from_buffer(blob, where=name)
    return matrix.rows, matrix.cols
