"""Policy: which tokens run in the next step. Pure Python and numpy, no torch."""
