"""Which replica gets a request, and where requests wait."""
