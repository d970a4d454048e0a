"""The loss of Ray's head node under load, seen from clients, with its state in a Redis.

    tests/integration/isolated.sh python -m tests.integration.head_loss --redis redis-server

Nodes are started as KubeRay starts them, by `ray start --block`; one node stands for one pod.
Clients, judge and healing are those of tests/integration/chaos.
"""
