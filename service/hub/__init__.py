"""Models by their id at the Hugging Face hub: the room that turns an id into a folder.

Whoever runs an engine gets folders only. Cache, token, endpoint and offline mode are the hub
library's own (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE). Knows no request and no tensor.
"""
