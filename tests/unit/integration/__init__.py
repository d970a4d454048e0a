"""Parts of the integration tests' tooling that run without Ray."""
