"""What people run against a service: programs with unmodified clients. Each is given a URL, and
ends with 0 where all it saw was right. Knows nothing of Tessera but its built-in model."""
