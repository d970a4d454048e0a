"""Tests that need an NVIDIA GPU; marked gpu, skipped elsewhere."""
