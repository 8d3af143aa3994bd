"""`--out`, looked at before the work begins: what cannot be written is told at once."""

import os
from pathlib import Path

from capsroute.cli.errors import UsageError


def file_to_write(path: Path) -> Path:
    """A path in a folder that takes files, and no folder itself; its folder is made if needed."""
    path = path.expanduser()
    if path.is_dir():
        raise UsageError(f"`--out` must be a file, got {path}: it is a folder")
    folder_to_write_to(path.parent)
    return path


def folder_to_write_to(path: Path) -> Path:
    """A folder that takes files; it is made if it is not there."""
    path = path.expanduser()
    if path.exists() and not path.is_dir():
        raise UsageError(f"`--out` must be a folder, got {path}: it is a file")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(
            f"`--out` must be where files may be written, got {path}: {reason}"
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"`--out` must be where files may be written, got {path}")
    return path
