"""The operating system: memory, threads, signals, streams, atomic files, worker processes."""
