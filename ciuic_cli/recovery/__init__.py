"""Row scales and norms tuned after rounding."""
