"""Tests of the CUDA graphs."""
