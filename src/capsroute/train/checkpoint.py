"""A run's folder: what may be written there, and checkpoints that are whole or not there.

`state.pt` is the run: weights, optimiser, average, every RNG, position. It is written under a
temporary name, synced and renamed, so the last good one stays until the next is whole.
`model.safetensors` is what a user takes away; it follows from the state and is never read back.
"""

import fcntl
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capsroute.files import write_json, write_whole
from capsroute.train.config import Config, differences, read_json

STATE_KEYS = {"model", "optimizer", "average", "totals", "step", "seconds", "rng"}


class RunFolder:
    """The files of one run."""

    lock: int | None = None  # a file descriptor

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.data = path / "data.json"
        self.state = path / "state.pt"
        self.model = path / "model.safetensors"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.curves = path / "curves.png"

    def check(self, config: Config) -> None:
        """Raise unless the folder is this config's or free to become it."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"`out` must be a folder, got {self.path}: it is a file")
        if self.config.exists():
            different = differences(config, read_json(self.config))
            if different and self.has_progress():
                longer = different[0].startswith(("`epochs`", "`steps`"))
                hint = (
                    f", and `--pretrained {self.path}` to start from its weights" if longer else ""
                )
                raise ValueError(
                    f"`out` must be a new folder or this run's, got {self.path}, which holds "
                    f"another run: {different[0]}; choose a folder with --out{hint}"
                )
            return
        if self.path.exists() and any(path.suffix != ".tmp" for path in self.path.iterdir()):
            raise ValueError(
                f"`out` must be a new folder or a run's, got {self.path}: it holds other files"
            )

    def has_progress(self) -> bool:
        """Whether a run got as far as a checkpoint or a number here."""
        return self.state.exists() or (self.metrics.exists() and self.metrics.stat().st_size > 0)

    def claim(self, config: Config) -> None:
        """Make the folder this config's, and this process's while it lives."""
        with self._told_if_not_writable():
            self.path.mkdir(parents=True, exist_ok=True)
        # the folder itself: its files are replaced, and a lock would stay with the old one
        self.lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go when the process ends
        except OSError:
            self.release()
            raise ValueError(
                f"`out` must be a folder that no other process is running, got {self.path}"
            ) from None
        self.check(config)  # again: another run may have begun and ended since
        if not self.config.exists() or differences(config, read_json(self.config)):
            with self._told_if_not_writable():
                write_whole(self.config, config.to_json().encode())
        for leftover in self.path.glob(".*.tmp*"):  # of a process that was killed while writing
            leftover.unlink()

    def write_data(self, record: dict[str, Any]) -> None:
        with self._told_if_not_writable():
            write_json(self.data, record)

    @contextmanager
    def _told_if_not_writable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
            raise OSError(
                f"`out` must be a folder that can be written, got {self.path}: {_reason(cause)}"
            ) from error

    def release(self) -> None:
        """Let other processes have the folder."""
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def save_state(self, state: dict[str, Any]) -> None:
        temporary = self.state.with_name(".state.pt.tmp")
        try:
            with temporary.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.state)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            temporary.unlink(missing_ok=True)
            kept = "; the one before is kept" if self.state.exists() else ""
            raise OSError(
                f"could not write a checkpoint to {self.path}: {_reason(error)}{kept}"
            ) from error
        _sync_folder(self.path)

    def load_state(self) -> dict[str, Any] | None:
        """The last checkpoint, or None before the first; a damaged one is an error."""
        if not self.state.exists():
            return None
        try:
            with zipfile.ZipFile(self.state) as archive:
                damaged = archive.testzip()  # compares every entry with its checksum
            if damaged is not None:
                raise zipfile.BadZipFile(f"{damaged} does not match its checksum")
            # on the CPU; whoever takes a part moves it. Adam counts its steps there on purpose
            state = torch.load(self.state, map_location="cpu", weights_only=True)
            if not isinstance(state, dict) or STATE_KEYS - state.keys():
                raise ValueError("it is no checkpoint of a run")
        except Exception as error:  # whatever a flipped bit makes of it
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ValueError(
                f"the checkpoint {self.state} is damaged ({reason}): restore it, or move it away "
                "to start this run again"
            ) from None
        return state

    def saved_step(self) -> int | None:
        """Of the last checkpoint, its tensors not read; None if none is there to be read."""
        with suppress(Exception):  # a damaged one is an error of the run that goes on from it
            state = torch.load(self.state, map_location="cpu", weights_only=True, mmap=True)
            return int(state["step"])
        return None

    def read_summary(self) -> dict[str, Any]:
        return read_json(self.summary)

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_json(self.summary, summary)


def _reason(error: OSError | RuntimeError) -> str:
    """In the system's words; torch's own, about a line of its source, come on top of them."""
    cause = error if isinstance(error, OSError) else error.__context__
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror[0].lower() + cause.strerror[1:]
    return " ".join(str(error).split())


def _sync_folder(path: Path) -> None:
    """A rename is durable only once its folder is."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rng_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_rng(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
