"""OpenAI's schemas: requests as strict pydantic models, responses as msgspec structs.

Every parameter is honoured or refused with a typed error that names it; none is ignored. Knows no
route and no transport.
"""
