"""Time, memory and disk of a run, predicted before it starts."""
