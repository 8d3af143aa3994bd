"""What a server takes on."""

from dataclasses import dataclass

MEBIBYTE = 2**20


@dataclass(frozen=True)
class Limits:
    """Limits on what clients may ask of a server."""

    max_batch: int = 32
    """Maximum images to run through the model together."""
    max_wait: float = 0.002
    """Seconds that an image waits for others already on their way."""
    predictions: int = 64
    """Maximum predictions in progress; further ones get a 503."""
    explanations: int = 8
    """The same for explanations, which run one at a time."""
    seconds: float = 10.0
    """Time limit for reading an upload, and again for answering it."""
    upload: int = 8 * MEBIBYTE
    """Maximum bytes in a request's body."""
    pixels: int = 25_000_000
    """Maximum pixels in a picture, by its header."""

    def __post_init__(self) -> None:
        for name in ("max_batch", "predictions", "explanations", "upload", "pixels"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}")
        if not self.max_wait >= 0:
            raise ValueError(f"`max_wait` must be 0 seconds or more, got {self.max_wait:g}")
        if not self.seconds > 0:
            raise ValueError(f"`seconds` must be above 0, got {self.seconds:g}")
