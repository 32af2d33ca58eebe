"""vLLM's view of an artifact: which of its modules hold codes, and how the files' names lead to them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.config import CompilationMode, get_current_vllm_config
from vllm.distributed import get_pp_group, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import WeightsMapper
from vllm.platforms import current_platform

from ciuic_cli.artifact.reader import Artifact, check_format, open_artifact
from ciuic_cli.artifact.schema import QUANT_METHOD
from ciuic_cli.errors import UsageError
from ciuic_cli.serving.vllm import inductor, names
from ciuic_cli.serving.vllm.experts import CompressedExpertsMethod
from ciuic_cli.serving.vllm.matrices import CompressedMatrixMethod, LatentProjectionMethod
from ciuic_cli.serving.vllm.weights import DecodingMapper, decoded


class CiuicVllmConfig(QuantizationConfig):
    """The quantization method "ciuic" of vLLM.

    vLLM builds it from the `quantization_config` of config.json and asks it for the method of every module.

    Raises InputError for an artifact that this version cannot read, or that is damaged.
    """

    def __init__(self, quantization: Mapping[str, Any]) -> None:
        super().__init__()
        check_format(quantization)
        self._stored: dict[str, str] = {}
        """Name in vLLM of a compressed tensor -> its name in the files."""
        self._folder: Path | None = None
        self._artifact: Artifact | None = None
        self._model_type = ""
        self._held: set[str] = set()
        """Tensors (by their names in the files) that modules of this process hold as codes."""

    def get_name(self) -> str:
        return QUANT_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """The compute capability that the CUDA kernels need, times 10."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: everything is in config.json."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> CiuicVllmConfig:
        return cls(config)

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Read the headers of the artifact's files. vLLM calls it before it builds the model."""
        artifact = open_artifact(model_name)
        self._folder = artifact.folder
        self._model_type = str(artifact.config.get("model_type", ""))
        self._stored = {names.renamed(name, self._model_type): name for name in artifact.blobs}

    def __getstate__(self) -> dict[str, Any]:
        """Without the mapped files: vLLM sends its configuration to the processes that it starts."""
        return {**self.__dict__, "_artifact": None}

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        """Rename the stored tensors as the model of vLLM renames its modules."""
        self._stored = hf_to_vllm_mapper.apply_dict(self._stored)

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:
        """The expert stacks' names, and the decoding of tensors whose modules cannot hold codes."""
        stacks = {
            f".experts.{name}": f".experts.routed_experts.{short}"
            for name, short in names.EXPERT_STACKS.items()
        }
        mapper = WeightsMapper(
            orig_to_new_regex={
                re.compile(re.escape(old)): new
                for old, new in names.RENAMED.get(self._model_type, {}).items()
            },
            orig_to_new_suffix=stacks if self._has_stacks else {},
        )
        return DecodingMapper.of(mapper, self._prepare)

    @property
    def _has_stacks(self) -> bool:
        return any(names.expert_tensors(name.rpartition(".")[0], self._stored) for name in self._stored)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of a module; None if vLLM's own suits.

        Raises UsageError under tensor parallelism, under pipeline parallelism on a CPU without compilation, and as
        `inductor.keep_order_of_writes`.
        """
        method = self._method(layer, prefix)
        if isinstance(method, CompressedMatrixMethod | CompressedExpertsMethod):
            if get_tensor_model_parallel_world_size() > 1 and not getattr(layer, "disable_tp", False):
                raise UsageError(
                    "ciuic artifacts cannot be split over GPUs by tensor parallelism: the Hadamard transform runs "
                    "across the columns of a matrix",
                    remedy="use --tensor-parallel-size 1; for experts --data-parallel-size N --enable-expert-parallel",
                )
            if current_platform.is_cpu():
                _prepare_for_cpu()
            self._held.update(method.tensors)
        return method

    def _method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, RoutedExperts):
            stacks = names.expert_tensors(prefix, self._stored)
            return CompressedExpertsMethod(layer.moe_config, self._in_files(stacks)) if stacks else None
        if isinstance(layer, VocabParallelEmbedding):
            name = names.embedding_tensor(prefix, self._stored)
            if name is not None:
                return CompressedMatrixMethod((self._stored[name],))
            # A head without a tensor of its own will be tied to the embedding.
            return CompressedMatrixMethod(()) if isinstance(layer, ParallelLMHead) and self._stored else None
        if isinstance(layer, LinearBase):
            tensors = names.linear_tensors(prefix, self._stored, self.packed_modules_mapping)
            if not tensors:
                return UnquantizedLinearMethod()
            latent = names.expands_latents(prefix) and get_current_vllm_config().model_config.use_mla
            return (LatentProjectionMethod if latent else CompressedMatrixMethod)(self._files(tensors))
        return None

    def _files(self, tensors: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(self._stored.get(name, name) for name in tensors)

    def _in_files(self, stacks: Mapping[str, str]) -> dict[str, str]:
        return {parameter: self._stored[name] for parameter, name in stacks.items()}

    def _prepare(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the files as the module takes that will get it: a blob that no module holds is decoded.

        A blob of a layer of another process (pipeline parallelism) stays as it is; vLLM skips it.
        """
        if name in self._held or name not in self._stored.values():
            return tensor
        layer = names.layer_of(name)
        if layer is not None and not any(held.startswith(layer) for held in self._held):
            return tensor
        if self._artifact is None:
            assert self._folder is not None  # set where _stored is
            self._artifact = open_artifact(self._folder)
        return decoded(self._artifact.blobs[name])


def _prepare_for_cpu() -> None:
    """Raise UsageError where vLLM for CPUs would stop at the first request; repair torch's compiler if it is used."""
    compiles = get_current_vllm_config().compilation_config.mode != CompilationMode.NONE
    if not compiles and get_pp_group().world_size > 1:
        # The warm-up of the compiled model makes the buffers of hidden states that come from another process.
        raise UsageError(
            "vLLM for CPUs has pipeline parallelism only for models that it compiles",
            remedy="remove --enforce-eager, or use --pipeline-parallel-size 1",
        )
    if compiles:
        inductor.keep_order_of_writes()
