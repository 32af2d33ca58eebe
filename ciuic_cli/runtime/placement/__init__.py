"""Models in two memories: what lies on the GPU, and what is computed in main memory."""
