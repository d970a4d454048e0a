"""The engine: its step, the thread that drives it, its clock, what crosses its border."""
