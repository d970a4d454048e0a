"""How checkpoints say which of their weights are quantised: one file a way of saying it."""
