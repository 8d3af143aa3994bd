"""What a run writes down at every evaluation: metrics.jsonl, curves.png, TensorBoard's files."""

import importlib.util
import time
from typing import Any

from capsroute.extras import install_hint
from capsroute.train.checkpoint import RunFolder
from capsroute.train.metrics import MetricsFile
from capsroute.train.pictures import draw_curves

DRAWING_SHARE = 100.0  # curves are drawn when that many times the time it takes has passed


class RunLog:
    """The records of a run so far, and the files that show them; one process has it."""

    def __init__(self, folder: RunFolder, title: str, *, tensorboard: bool) -> None:
        if tensorboard and importlib.util.find_spec("tensorboard") is None:
            raise ValueError(
                f"`tensorboard` must be installed for that: {install_hint('tensorboard')}"
            )
        self.folder, self.title, self.tensorboard = folder, title, tensorboard
        self.metrics = MetricsFile(folder.metrics)
        self.records: list[dict[str, Any]] = []
        self.board: Any = None
        self.draw_again = 0.0

    def resume(self, step: int) -> None:
        """Go on after `step`; what was written beyond it will be measured again."""
        self.records = self.metrics.forget_after(step)
        if self.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(self.folder.path), purge_step=step + 1)

    def write(self, record: dict[str, Any], last: bool) -> None:
        self.records.append(record)
        self.metrics.append(record)
        began = time.monotonic()
        if last or began > self.draw_again:
            draw_curves(self.records, self.folder.curves, self.title)
            self.draw_again = began + DRAWING_SHARE * (time.monotonic() - began)
        if self.board is not None:
            for key, value in record.items():
                if isinstance(value, float):
                    self.board.add_scalar(key, value, record["step"])

    def close(self) -> None:
        if self.board is not None:
            self.board.close()
