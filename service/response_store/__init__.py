"""What responses are kept for later calls: by whom, how many and for how long. Knows no HTTP."""
