"""Direct Multi-Token Decoding: late layers alone emit the next tokens of a cycle (arXiv 2510.11958)."""
