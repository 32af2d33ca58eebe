"""The memory report: its schema, the HTML page, the model card, and the inspection of folders."""
