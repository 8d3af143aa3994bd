"""What a server takes on."""

from dataclasses import dataclass

MEBIBYTE = 2**20


@dataclass(frozen=True)
class Limits:
    """Everything that a client could ask too much of."""

    max_batch: int = 32
    """Images that go through the model together at most."""
    max_wait: float = 0.002
    """Seconds that an image waits for others that are on their way."""
    predictions: int = 64
    """Predictions in progress at most; further ones are answered 503."""
    explanations: int = 8
    """The same for explanations, which go one by one."""
    seconds: float = 10.0
    """To read an upload, and again to answer it."""
    upload: int = 8 * MEBIBYTE
    """Bytes of a request's body."""
    pixels: int = 25_000_000
    """Of a picture, by its header."""

    def __post_init__(self) -> None:
        for name in ("max_batch", "predictions", "explanations", "upload", "pixels"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}")
        if not self.max_wait >= 0:
            raise ValueError(f"`max_wait` must be 0 seconds or more, got {self.max_wait:g}")
        if not self.seconds > 0:
            raise ValueError(f"`seconds` must be above 0, got {self.seconds:g}")
