"""Tests of models that are an encoder alone."""
