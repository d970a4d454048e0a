"""What a chat's text means: thinking, tool calls, content; and grammars that make it mean that.

Knows characters and JSON schemas. Knows no protocol, no tokens but the marks of a format.
"""
