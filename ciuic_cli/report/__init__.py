"""The memory report, its HTML page and the model card; descriptions of checkpoints and artifacts."""
