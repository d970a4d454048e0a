"""What can go wrong on a channel. Never shown to a client: the router turns it into an ApiError."""


class ChannelError(Exception):
    """A channel cannot be used any longer; the connection is closed."""


class FrameError(ChannelError):
    """The peer sent bytes that are no frame: too long, not msgpack or of an unknown type."""


class AuthenticationError(ChannelError):
    """The peer does not hold the replica's channel key."""
