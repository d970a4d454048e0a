"""Weights that stay on their device as a checkpoint stores them. Knows no product and no recipe."""
