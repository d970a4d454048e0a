"""What tensors of a causal model are called in checkpoints of models around one."""

# As transformers saves it now and saved it before.
_WRAPPED = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}


def unwrapped(name: str) -> str:
    """A causal model's name of what a checkpoint calls so."""
    for wrapped, plain in _WRAPPED.items():
        if name.startswith(wrapped):
            return plain + name.removeprefix(wrapped)
    return name
