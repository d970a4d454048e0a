"""What the nightly targets count, and how they judge it."""
