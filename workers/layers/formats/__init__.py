"""How weights are stored: which tensors a module has, how ranks cut them, what they stand for."""
