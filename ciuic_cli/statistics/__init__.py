"""What the calibration text says about every matrix, gathered layer by layer."""
