"""Fine-tuning of compressed models: adapters on the codes, training data, and transformers' Trainer around them."""
