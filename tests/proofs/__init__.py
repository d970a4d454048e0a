"""Which cells of docs/attention-backends.md a test proves, and what a run on a GPU proved."""
