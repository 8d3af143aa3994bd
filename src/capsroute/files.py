"""Files that are there whole or not at all."""

import os
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write under a temporary name, sync, rename: a reader never sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:  # a full disk names no file
        raise OSError(f"could not write {path}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
