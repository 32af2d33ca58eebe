"""HQQ with the library's own defaults; its quantized layers are stored together with the unchanged tensors."""

from __future__ import annotations

import torch
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
from job import Job, common_group, linear_names, main, tensor_bytes, write_dense
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


def work(job: Job) -> int:
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.bfloat16)
    names = linear_names(model)
    group = common_group([model.get_submodule(name).in_features for name in names], job.options["group"])
    config = BaseQuantizeConfig(nbits=job.options["bits"], group_size=group)
    weights, stored = {}, {}
    for name in names:
        layer = HQQLinear(
            model.get_submodule(name), quant_config=config, compute_dtype=torch.bfloat16, device="cpu"
        )
        weights[f"{name}.weight"] = layer.dequantize()
        parts = {
            "W_q": layer.W_q,
            "scale": layer.meta["scale"],
            "zero": layer.meta["zero"],
            "bias": layer.bias,
        }
        stored |= {f"{name}.{part}": value.contiguous() for part, value in parts.items() if value is not None}
        model.set_submodule(name, torch.nn.Identity())
    stored |= {name: value.data.clone() for name, value in model.named_parameters()}  # a tied head once
    save_file(stored, job.artifact / "model.safetensors")
    write_dense(job.model, weights, job.dense)
    return tensor_bytes(job.artifact)


if __name__ == "__main__":
    main(work)
