"""Commands that hand an artifact to other people and programs."""
