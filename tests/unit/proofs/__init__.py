"""What tests prove of the attention backends, and how that is written down."""
