"""Layers that know how to shard themselves over tensor-parallel ranks."""
