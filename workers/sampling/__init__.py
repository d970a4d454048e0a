"""From logits to token ids, batched over ragged parameters."""
