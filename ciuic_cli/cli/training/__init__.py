"""Commands that plan training runs."""
