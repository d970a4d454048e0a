"""Reading a model folder: its configs, its safetensors files, the tensors into the layers."""
