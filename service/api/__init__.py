"""The client-facing protocols: OpenAI over HTTP, gRPC, and one table of errors."""
