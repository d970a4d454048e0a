"""Audio files to what an encoder hears. Runs in tokenizer processes; knows no request."""
