"""What a model predicts and how fast it runs: perplexity, KL divergence, benchmarks."""
