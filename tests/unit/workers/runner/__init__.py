"""Tests of one rank's runner."""
