"""Self-distillation: a source model answers prompts, and its answers become training data for its own conversion."""
