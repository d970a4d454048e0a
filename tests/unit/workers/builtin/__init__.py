"""Tests of the model that ships: its text, its tokenizer, how it is fitted, what it says."""
