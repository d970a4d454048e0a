"""Mixtures of experts: how tokens choose, what experts are, and how ranks share them."""
