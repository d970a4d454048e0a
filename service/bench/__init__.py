"""`tessera bench`: one seeded workload, sent over HTTP, gRPC or in process, and what came of it.

Knows the protocols as a client does. Knows no server internals and no Ray.
"""
