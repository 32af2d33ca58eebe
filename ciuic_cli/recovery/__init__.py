"""Row scales and norms are tuned after rounding, to bring predictions nearer to the original's."""
