"""What `hf-aspire` runs; nothing of the engine depends on it."""
