"""Models that are an encoder alone: whole texts in, a vector or scores of each out, in one step."""
