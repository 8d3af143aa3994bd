"""Which experiment stands where in the paper's tables and figure, in the paper's order."""

from dataclasses import dataclass

from capsroute.experiments.presets import list_experiments, preset

DATA = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "diverse_multimnist": "DiverseMultiMNIST"}


@dataclass(frozen=True)
class Row:
    """An experiment, its cells under the table's headings, and its curve: panel and label."""

    experiment: str
    cells: tuple[str, ...]
    panel: str
    line: str


@dataclass(frozen=True)
class Table:
    key: str
    """Names the table's figure."""
    title: str
    headings: tuple[str, ...]
    rows: tuple[Row, ...]


def cifar() -> Table:
    """Table 1: six capsule networks and two CNNs on two datasets."""
    methods = [
        ("dynamic", "simple", "dynamic_simple_{}_r1"),
        ("EM", "simple", "em_simple_{}_r2"),
        ("inverted", "simple", "inverted_simple_{}_r4"),
        ("dynamic", "ResNet", "dynamic_resnet_{}_r1"),
        ("EM", "ResNet", "em_resnet_{}_r2"),
        ("inverted", "ResNet", "inverted_resnet_{}_r2"),
        ("baseline CNN", "–", "cnn_{}"),
        ("ResNet-18", "–", "resnet18_{}"),
    ]
    rows = [
        Row(
            name.format(data),
            (DATA[data], method, backbone),
            panel=DATA[data],
            line=method if backbone == "–" else f"{method}, {backbone}",
        )
        for data in ("cifar10", "cifar100")
        for method, backbone, name in methods
    ]
    title = "Table 1: CIFAR-10 and CIFAR-100"
    return Table("cifar", title, ("data", "method", "backbone"), tuple(rows))


ROUTINGS = {
    "dynamic": "dynamic_simple_cifar10",
    "EM": "em_simple_cifar10",
    "inverted A (no LayerNorm)": "inverted_simple_cifar10_a",
    "inverted B (sequential)": "inverted_simple_cifar10_b",
    "inverted C (activations)": "inverted_simple_cifar10_c",
    "inverted": "inverted_simple_cifar10",
}
"""The lines of the iteration figure, and the experiments' names without their iterations."""
ITERATIONS = range(1, 6)


def iterations() -> Table:
    """The figure: six routings at 1 to 5 iterations."""
    rows = [
        Row(
            f"{name}_r{count}",
            (routing, str(count)),
            routing,
            f"{count} iteration{'s'[: count - 1]}",
        )
        for routing, name in ROUTINGS.items()
        for count in ITERATIONS
    ]
    title = "Figure: routing iterations on CIFAR-10, simple backbone"
    return Table("iterations", title, ("routing", "iterations"), tuple(rows))


def multimnist() -> Table:
    """The DiverseMultiMNIST table, and the two models that the text adds to it."""
    models = [
        ("dynamic", "vector", "dynamic_vector_multimnist_r3"),
        ("inverted", "matrix", "inverted_matrix_multimnist_r2"),
        ("inverted", "vector", "inverted_vector_multimnist_r2"),
        ("baseline CNN", "–", "cnn_multimnist"),
        ("inverted", "matrix, wide", "inverted_matrix_multimnist_wide_r2"),
        ("CNN, learned pooling", "–", "cnn_multimnist_learned_pool"),
    ]
    rows = [
        Row(
            name,
            (method, poses),
            panel=DATA["diverse_multimnist"],
            line=method if poses == "–" else f"{method}, {poses}",
        )
        for method, poses, name in models
    ]
    return Table("multimnist", "DiverseMultiMNIST", ("method", "poses"), tuple(rows))


def beyond() -> Table:
    """Every other preset: our own recipes, and what the authors give averages of alone."""
    printed = {
        row.experiment for table in (cifar(), iterations(), multimnist()) for row in table.rows
    }
    rows = []
    for name in list_experiments():
        if name not in printed:
            data = preset(name).config.data.data
            shown = DATA.get(data, data)
            rows.append(Row(name, (shown,), panel=shown, line=name))
    return Table("beyond", "Beyond the paper's tables", ("data",), tuple(rows))


def all_tables() -> list[Table]:
    return [cifar(), iterations(), multimnist(), beyond()]
