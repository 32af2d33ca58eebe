"""bitsandbytes: NF4 with double quantization, as transformers loads and saves it."""

from __future__ import annotations

import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from job import Job, main, tensor_bytes, write_dense
from transformers import AutoModelForCausalLM, BitsAndBytesConfig


def work(job: Job) -> int:
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=job.options["type"],
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        job.model, quantization_config=config, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    model.save_pretrained(job.artifact)
    weights = {
        f"{name}.weight": dequantize_4bit(module.weight.data, module.weight.quant_state)
        for name, module in model.named_modules()
        if isinstance(module, Linear4bit)
    }
    write_dense(job.model, weights, job.dense)
    return tensor_bytes(job.artifact)


if __name__ == "__main__":
    main(work)
