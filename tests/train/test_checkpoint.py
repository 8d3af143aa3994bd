"""A run's folder when the disk is full."""

import pytest
import torch

from capsroute.train.checkpoint import RunFolder


@pytest.mark.parametrize("before", [True, False])
def test_a_full_disk_is_one_line_in_the_systems_words(tmp_path, before):
    folder = RunFolder(tmp_path)
    if before:
        folder.save_state({"step": 1})
    (tmp_path / ".state.pt.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError) as raised:
        folder.save_state({"model": torch.zeros(100_000)})
    kept = "; the one before is kept" if before else ""
    message = f"could not write a checkpoint to {tmp_path}: no space left on device{kept}"
    assert str(raised.value) == message
    assert folder.state.exists() is before and not list(tmp_path.glob(".*"))
