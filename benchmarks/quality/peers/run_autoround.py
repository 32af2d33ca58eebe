"""AutoRound (signed gradient descent on the rounding) on all linear layers but the head."""

from __future__ import annotations

import torch
from auto_round import AutoRound
from job import Job, common_group, linear_names, main, tensor_bytes, write_dense
from transformers import AutoModelForCausalLM, AutoTokenizer


def work(job: Job) -> int:
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.bfloat16)
    names = linear_names(model)
    group = common_group([model.get_submodule(name).in_features for name in names], job.options["group"])
    length = job.tokens.shape[1]
    rounding = AutoRound(
        model,
        AutoTokenizer.from_pretrained(job.model),
        scheme=f"W{job.options['bits']}A16",
        group_size=group,
        iters=job.options["iterations"],
        dataset=list(job.tokens.split(8)),
        seqlen=length,
        nsamples=len(job.tokens),
        batch_size=8,
        device_map="cpu",
        enable_torch_compile=False,
    )
    rounding.quantize()
    # Its model now holds the rounded weights in dense form; saving packs the same values.
    weights = {f"{name}.weight": rounding.model.get_submodule(name).weight.data.clone() for name in names}
    rounding.save_quantized(str(job.artifact), format="auto_round", inplace=True)
    write_dense(job.model, weights, job.dense)
    return tensor_bytes(job.artifact)


if __name__ == "__main__":
    main(work)
