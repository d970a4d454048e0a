"""The device side of KV memory, in two levels: request to token index, token index to K and V."""
