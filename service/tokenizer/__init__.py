"""Text to tokens in a pool of processes, tokens to text incrementally in place.

Knows a model folder's tokenizer.json and chat template. Knows no request, no HTTP and no engine.
"""
