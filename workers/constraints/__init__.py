"""Grammars that outputs obey: compiled beside the steps, turned into masks of allowed tokens."""
