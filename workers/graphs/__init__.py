"""CUDA graphs: decode steps, segments between layers' attention, the ring that feeds them."""
