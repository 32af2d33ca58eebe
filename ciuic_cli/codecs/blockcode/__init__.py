"""The block code: numbers in 8 or 4 bits with one scale per block, for activations, gradients and weights."""
