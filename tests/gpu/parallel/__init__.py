"""Tensor parallelism on GPUs: needs two of them, some tests four."""
