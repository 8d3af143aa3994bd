"""What a job of several processes leaves behind, seen in one process without a network."""

import traceback
import weakref

import pytest
import torch.distributed as dist

from capsroute.train.distributed import processes


class Model:
    """Stands for one in DistributedDataParallel, which holds the group."""

    def fail(self):
        raise OSError("the disk is full")


def fail_twice(model):
    try:
        model.fail()
    finally:
        raise ValueError("could not close")


def fail_for_a_cause(model):
    try:
        model.fail()
    except OSError as error:
        raise ValueError("could not write") from error


def fail_and_hide_why(model):
    try:
        model.fail()
    except OSError:
        raise SystemExit(1) from None


@pytest.fixture
def held(monkeypatch):
    """Models alive when the group goes; two processes, the other of which is never asked."""
    models, alive = [], []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(dist, "init_process_group", lambda backend: None)
    monkeypatch.setattr(
        dist, "destroy_process_group", lambda: alive.append([one() is not None for one in models])
    )
    return models, alive


@pytest.mark.parametrize("fail", [Model.fail, fail_twice, fail_for_a_cause, fail_and_hide_why])
def test_no_frame_of_an_error_holds_the_model_when_the_group_goes(held, fail):
    models, alive = held

    def work():
        model = Model()
        models.append(weakref.ref(model))
        fail(model)

    with pytest.raises((OSError, ValueError, SystemExit)) as caught, processes("cpu"):
        work()
    assert alive == [[False]]
    printed = "".join(traceback.format_exception(caught.value))
    assert "fail(model)" in printed  # --debug still shows where
    assert ("the disk is full" in printed) is (fail is not fail_and_hide_why)
