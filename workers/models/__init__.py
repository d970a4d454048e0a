"""Model architectures, one native file a family."""
