"""Tests of the benchmark client."""
