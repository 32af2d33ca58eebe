"""The trellis code for weights: rounding, decoding, its byte layout, its input transform, its definition."""
