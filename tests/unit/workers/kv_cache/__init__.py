"""Unit tests of workers/kv_cache."""
