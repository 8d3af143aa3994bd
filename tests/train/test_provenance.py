"""Where a result was made, in words."""

import pytest
import torch

from capsroute.train.provenance import device_name


@pytest.mark.parametrize(("threads", "words"), [(1, "CPU, 1 thread"), (3, "CPU, 3 threads")])
def test_a_cpu_is_named_with_its_threads(monkeypatch, threads, words):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert device_name(torch.device("cpu")).endswith(words)
