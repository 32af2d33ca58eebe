"""The account of a run: operations, bytes and processor time by phase, step and kind of matrix."""
