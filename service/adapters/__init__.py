"""Adapters as clients see them: names beside those of models, loaded and unloaded while serving."""
