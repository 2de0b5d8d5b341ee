"""Efficient-DLM: block diffusion from an AR model, several tokens per forward by confidence (arXiv 2512.14067)."""
