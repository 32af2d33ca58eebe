"""The byte budget: weight matrices, their arms and prices, the knapsack, the plan, probes."""
