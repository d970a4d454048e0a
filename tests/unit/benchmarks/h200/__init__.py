"""Tests of what the H200 benchmarks do besides running on an H200."""
