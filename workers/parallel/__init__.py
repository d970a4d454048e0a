"""Tensor parallelism: rank processes, groups passed as values, the plan's broadcast."""
