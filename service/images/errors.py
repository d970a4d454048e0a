"""Why an image is not shown to a model. Knows no format."""


class ImageRefusedError(Exception):
    """A file that cannot be seen. The message may go to a client."""
