"""Protocol-neutral request handling: check, tokenise, submit, stream, finish.

HTTP and gRPC build a GenerationRequest and render the events that come back; neither knows the
other, and this package knows neither.
"""
