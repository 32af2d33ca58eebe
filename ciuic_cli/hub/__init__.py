"""Models on the Hugging Face hub: which of their files are fetched, and their headers without the weights."""
