"""The page at `GET /`: chat with the model, and see its attention at work. Static files."""
