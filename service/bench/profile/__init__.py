"""`tessera bench --profile`: where the time of an engine's steps goes, against what it must cost.

Drives an engine in this process. Knows no protocol and no server.
"""
