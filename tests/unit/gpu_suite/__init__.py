"""What the GPU suite is made of, as far as it needs no GPU."""
