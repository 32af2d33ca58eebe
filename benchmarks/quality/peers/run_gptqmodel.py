"""GPTQModel: GPTQ on all linear layers but the head, symmetric groups, activation order as the library chooses."""

from __future__ import annotations

import os

# On two cores GPTQModel starts one worker by default and then waits for two.
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")

from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.nn_modules.qlinear import BaseQuantLinear
from job import Job, common_group, linear_names, main, tensor_bytes, write_dense


def work(job: Job) -> int:
    config = QuantizeConfig(bits=job.options["bits"], group_size=job.options["group"])
    model = GPTQModel.load(str(job.model), config, device="cpu", dtype="bfloat16")
    widths = [model.model.get_submodule(name).in_features for name in linear_names(model.model)]
    config.group_size = common_group(widths, job.options["group"])
    sequences = [{"input_ids": row[None], "attention_mask": (row[None] * 0) + 1} for row in job.tokens]
    model.quantize(sequences, batch_size=1)
    model.save(str(job.artifact))
    del model

    stored = GPTQModel.load(str(job.artifact), device="cpu", backend=BACKEND.TORCH)
    weights = {}
    for name, module in stored.model.named_modules():
        if isinstance(module, BaseQuantLinear):
            # The class's own method: the instance's may be one that a compiler has replaced.
            weights[f"{name}.weight"] = type(module).dequantize_weight(module).T
    write_dense(job.model, weights, job.dense)
    return tensor_bytes(job.artifact)


if __name__ == "__main__":
    main(work)
