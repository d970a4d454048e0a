"""Tests of `tessera bench --profile`."""
