"""Compression passes: pruning, low-rank parts and rounding. Each pass predicts its loss and applies itself.

Reading order: fisher (the loss), linear_algebra, column_order, feedback (block LDL factors), effective_variance,
prepare, predicted_loss, rounding; then scale (input scales), row_sorting, lowrank and prune.
"""
