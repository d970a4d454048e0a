"""The token way: one connection per (ingress, replica), one frame per engine step.

Knows sockets, frames and heartbeats. Knows neither Ray nor routing nor text.
"""
