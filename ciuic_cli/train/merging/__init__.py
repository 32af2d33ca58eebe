"""Merging a LoRA adapter into a compressed model: coded again, as a low-rank part, or as dense bfloat16."""
