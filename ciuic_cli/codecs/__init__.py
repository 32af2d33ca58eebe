"""The trellis code for weights: its definition, rounding and decoding, its byte layout, its input transform.

Reading order: reference (the definition of the code), rate_distortion, bits, scales, row_order, transform, sizes,
header, layout, packing, stack (the bytes), native, trellis (rounding, decoding, products); testing is for tests."""
