"""Drafts of tokens to come, and how much of them was right."""
