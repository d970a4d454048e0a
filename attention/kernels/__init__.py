"""Kernels that backends call: tensors and index tables in, tensors out. Know no batch, no pool."""
