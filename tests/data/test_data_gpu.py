"""What a GPU adds: the same bytes as on the CPU, and capture in a CUDA graph."""

import pytest
import torch

from capsroute.data import ArraySplit, Augment, DiverseMultiMNIST, TrainBatches

pytestmark = pytest.mark.gpu


@pytest.fixture
def splits(mnist):
    torch.manual_seed(0)
    images = torch.randint(0, 256, (500, 3, 32, 32), dtype=torch.uint8)
    return (
        ArraySplit(images, torch.arange(500)),
        DiverseMultiMNIST.from_digits(mnist.train_images, mnist.train_labels),
    )


@pytest.mark.parametrize("which", [0, 1], ids=["array", "generated"])
def test_same_bits_as_on_the_cpu(splits, which):
    options = {"seed": 3, "augment": Augment(cutout=8)}
    cpu = TrainBatches(splits[which], 128, **options)
    gpu = TrainBatches(splits[which].to("cuda"), 128, **options)
    for step in (0, 3, 500):
        expected, found = cpu.batch(step), gpu.batch(step)
        assert found[0].is_cuda and found[1].is_cuda
        assert torch.equal(found[0].cpu(), expected[0])
        assert torch.equal(found[1].cpu(), expected[1])


@pytest.mark.parametrize("which", [0, 1], ids=["array", "generated"])
def test_render_is_captured_in_a_graph(splits, which):
    batches = TrainBatches(splits[which].to("cuda"), 64, augment=Augment(cutout=8))
    plan = batches.plan(0).cuda()
    batches.render(plan)  # warm-up
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        images, targets = batches.render(plan)
    for step in (1, 2):
        plan.copy_(batches.plan(step))
        graph.replay()
        expected = batches.batch(step)
        assert torch.equal(images, expected[0]) and torch.equal(targets, expected[1])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("which", [0, 1], ids=["array", "generated"])
def test_nothing_waits_for_the_device(splits, which):
    batches = TrainBatches(splits[which].to("cuda"), 64, augment=Augment(cutout=8))
    batches.batch(0)
    try:
        torch.cuda.set_sync_debug_mode("error")
        batches.batch(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_does_not_fit_streams(monkeypatch, splits):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 1000))
    streamed = splits[0].to("cuda")
    assert not streamed.resident and streamed.images.device.type == "cpu"
    augment = Augment()
    found = TrainBatches(streamed, 64, augment=augment)
    expected = TrainBatches(splits[0], 64, augment=augment)
    for step in (0, 1, 2):
        images, targets = found.batch(step)
        assert images.is_cuda
        assert torch.equal(images.cpu(), expected.batch(step)[0])
        assert torch.equal(targets.cpu(), expected.batch(step)[1])
