"""A cluster under random kills, seen from its clients.

    tests/integration/isolated.sh python -m tests.integration.chaos --minutes 10 --streams 200

Real Ray, several raylets on one machine; a paced fake engine for most streams and the built-in
model on two ranks for some. docs/operations.md, "When something dies", has the promises.
"""
