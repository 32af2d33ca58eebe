"""Using a model from the command line: text generation, chat, and an HTTP server, all of them transformers' own."""
