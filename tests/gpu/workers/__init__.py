"""The engine and its kernels on a GPU."""
