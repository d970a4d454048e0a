"""OpenAI's Responses API: requests as strict pydantic models, responses as msgspec structs.

As in service.api.openai every field is honoured or refused by name. What is asked for becomes the
handler's request, and what comes of it is written as items; nothing here generates or keeps.
"""
