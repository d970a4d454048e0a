"""Embeddings: a request's result is a vector that is pooled from its prompt's final states."""
