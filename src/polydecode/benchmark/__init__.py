"""Measuring a checkpoint against its own one-token-per-forward decoding."""
