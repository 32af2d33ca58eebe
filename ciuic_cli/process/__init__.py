"""Everything about the operating system: memory, threads, signals, standard streams, files, worker processes."""
