"""Memory of a training step: activations, weights and optimizer states in few bits."""
