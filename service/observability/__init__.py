"""What can be seen from outside: metrics, traces, the request log."""
