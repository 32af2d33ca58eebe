"""The commands that use a model: `generate`, `chat` and `serve`."""
