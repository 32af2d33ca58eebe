"""How torch computes the operations of a layer: precision, attention, stable bits, few shapes."""
