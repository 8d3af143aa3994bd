"""Files that are there whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """As indented JSON, whole or not at all."""
    write_whole(path, (json.dumps(value, indent=1) + "\n").encode())


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
