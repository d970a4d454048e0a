"""Image files to what a model's eyes see. Runs in tokenizer processes; knows no request."""
