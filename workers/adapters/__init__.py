"""Low-rank adapters (LoRA) of one model: their files, where they are kept and what they add."""
