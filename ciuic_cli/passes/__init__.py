"""The passes: what pruning, a low-rank part and rounding would cost, and how each is done."""
