"""Kronecker-factored Fisher information of every weight matrix, collected layer by layer on calibration text."""
