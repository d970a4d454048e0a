"""Tensor parallelism on GPUs: needs two of them."""
