"""The source model itself, one token per forward: the baseline of every comparison."""
