"""Bit allocation: every choice's predicted loss and exact bytes (arms), the knapsack over them, and the plan.

Reading order: matrices, row_chunks, machine, pool_factors, arms, arms_file, pricing; artifact_size, plan, knapsack,
group_knapsack, planning, reachable; probes (measured corrections of the predicted loss).
"""
