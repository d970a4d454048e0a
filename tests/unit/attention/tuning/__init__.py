"""Of attention/tuning."""
