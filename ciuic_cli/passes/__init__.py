"""Compression passes: rounding, input scales, sorted rows, low-rank parts, pruning. Each predicts its loss.

Reading order: fisher (the loss), linear_algebra, column_order, feedback (block LDL factors), effective_variance,
prepare, predicted_loss, rounding; then scale (input scales), row_sorting, lowrank and prune.
"""
