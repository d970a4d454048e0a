"""Accounting of KV pages and of cached prefixes. Pure Python and numpy, no torch."""
