"""The gRPC schema and its generated code."""
