"""What is known of a request while it runs, and the log lines that tell it."""
