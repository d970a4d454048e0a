"""Ranks of one engine."""
