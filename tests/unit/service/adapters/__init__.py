"""Adapters as clients and operators see them."""
