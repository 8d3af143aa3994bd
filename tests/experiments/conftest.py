"""Evidence of two experiments: three seeds of one, one of the other."""

import pytest

from small_experiments import write_evidence


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "results"
    for seed, accuracies in enumerate(([94.0, 94.9, 94.4], [94.2, 94.7, 94.8], [93.0, 94.4, 94.3])):
        write_evidence(folder, "inverted_resnet_cifar10_r2", accuracies, seed=seed)
    write_evidence(folder, "inverted_simple_cifar10_r2", [80.0, 85.1])
    return folder
