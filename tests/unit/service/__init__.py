"""Unit tests of service."""
