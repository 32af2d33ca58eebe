"""The command line: one file per command, the console, tables."""
