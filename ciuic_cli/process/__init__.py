"""The process and the operating system: memory, threads, signals, streams, files, worker processes, progress."""
