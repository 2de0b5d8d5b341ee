"""Tensor functions and the thin seams to transformers; nothing here knows a decoding method."""
