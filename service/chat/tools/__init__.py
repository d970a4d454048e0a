"""How families of models write tool calls: one parser and one grammar each."""
