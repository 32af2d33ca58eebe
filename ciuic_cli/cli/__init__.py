"""The command line: one file per command, the console, the tables, and the exit codes."""
