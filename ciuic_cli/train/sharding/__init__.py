"""Parameters, gradients and optimizer states divided among processes (ZeRO-3), by torch's FSDP2."""
