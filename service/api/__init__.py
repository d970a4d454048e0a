"""The client-facing protocols: OpenAI's and Anthropic's over HTTP, gRPC, one table of errors."""
