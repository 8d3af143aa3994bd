"""What a run is made of. Frozen dataclasses; the command line overrides any field by its name."""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

LARGEST_SEED = 2**63  # processes add a little to it, and 64 bits must hold that
MOST_ITERATIONS = 100  # the paper goes to 5; time and memory of a step grow with them
AT_LEAST = {
    "batch_size": 1,
    "epochs": 1,
    "steps": 1,
    "seed": 0,
    "eval_every": 0,
    "eval_batch_size": 1,
    "checkpoint_every": 0,
    "accumulate": 1,
    "bn_group": 1,
    "image_size": 1,
    "padding": 0,
    "cutout": 0,
    "crop": 1,
}
NOT_NEGATIVE = ("lr", "weight_decay", "capsule_decay", "clip")
DECISIVE = ("data", "pretrained", "backbone")  # the model, the recipe and the name follow from them
SHARES = ("validation", "momentum", "warmup", "label_smoothing", "ema")


@dataclass(frozen=True)
class ModelConfig:
    """The model, and the options in which it departs from its registered self."""

    model: str = "inverted_small_multimnist"
    """A name that `capsroute models` lists."""
    iterations: int | None = None
    """Routing iterations; the model's own unless given."""
    schedule: Literal["concurrent", "sequential"] | None = None
    """Which layer routes when (inverted models)."""
    bn_group: int | None = None
    """Images that a BatchNorm group sees (models with BatchNorm); 16 is the paper's recipe."""
    layer_norm: bool | None = None
    """Off for ablation A (inverted models)."""
    activations: bool | None = None
    """On for ablation C (inverted models)."""
    initial_poses: Literal["zeros", "random", "learned"] | None = None
    """Poses before the first iteration (inverted models)."""
    backbone: str | None = None
    """A backbone of timm by name, such as timm/resnet50 (inverted ResNet models)."""
    pretrained: str | None = None
    """Weights to start from: a run's folder, a model whose weights ship, or timm (backbone's)."""

    def options(self) -> dict[str, Any]:
        """Keyword arguments for `create_model`: what was given."""
        fields = [key for key in self.__dataclass_fields__ if key not in ("model", "pretrained")]
        return {key: getattr(self, key) for key in fields if getattr(self, key) is not None}


@dataclass(frozen=True)
class DataConfig:
    """The images, and what training does to them."""

    data: str = "diverse_multimnist"
    """cifar10, cifar100, mnist, fashion_mnist, diverse_multimnist, or a folder of images."""
    data_root: str | None = None
    """Where downloaded data lies; $CAPSROUTE_DATA or ~/.cache/capsroute unless given."""
    image_size: int | None = None
    """Side that a folder's images are resized to; worked out from the images unless given."""
    strict: bool = False
    """A broken image file is an error, not skipped."""
    validation: float = 0.0
    """Share of the training images set aside to choose by."""
    padding: int = 0
    """Black pixels around an image before a random crop."""
    flip: bool = False
    """Mirror every other image."""
    cutout: int = 0
    """Side of a square blacked out; 0 for none."""
    cutmix: float = 0.0
    """Share of the images that get a rectangle of another image, and its class to that extent."""
    crop: int | None = None
    """Side of the square that training cuts at random, evaluation from the centre."""


@dataclass(frozen=True)
class OptimConfig:
    """The loss and its descent."""

    loss: Literal["auto", "cross_entropy", "binary_cross_entropy", "margin", "spread"] = "auto"
    """`auto`: what the model's family was published with."""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """SGD with momentum, or Adam."""
    lr: float = 0.1
    """Learning rate at its highest."""
    momentum: float = 0.9
    """Of SGD."""
    nesterov: bool = False
    """Look ahead along the momentum."""
    weight_decay: float = 5e-4
    """L2 penalty on every parameter, as in the authors' code."""
    capsule_decay: float | None = None
    """The penalty on what routes, transforms and norms of the capsule layers, if another."""
    lr_schedule: Literal["step", "cosine", "constant"] = "step"
    """`step`: ÷10 at each milestone; `cosine`: to zero at the end."""
    milestones: tuple[int, ...] = (150, 250)
    """Epochs after which `step` divides the learning rate by 10."""
    warmup: float = 0.0
    """Share of the run over which the learning rate rises from zero."""
    label_smoothing: float = 0.0
    """Share of the target spread over all classes; of several labels, each moves towards 0.5."""
    ema: float = 0.0
    """Decay of an average of the weights, which is then what is evaluated; 0 for none."""
    clip: float = 0.0
    """Largest norm of the gradient; 0 for no limit."""
    accumulate: int = 1
    """Pieces that a batch is taken in, to save memory."""


@dataclass(frozen=True)
class Config:
    """A whole run, as asked for.

    config.json keeps it so, since the same command must find its own run on any machine;
    what was left open is in summary.json, under `resolved`.
    """

    experiment: str = "inverted_small_multimnist"
    """Of the run: the preset's name, or that of a folder of images."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    batch_size: int = 128
    """Images in a step, over all processes."""
    epochs: int = 350
    """Passes over the training images (60,000 images each for DiverseMultiMNIST)."""
    steps: int | None = None
    """Length in steps instead of epochs."""
    seed: int = 0
    """Of the initial weights, the order of the images and their augmentation."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: convolutions and stored poses; agreement, softmax and norms stay float32."""
    eval_every: int = 0
    """Steps between evaluations; 0: every epoch."""
    eval_batch_size: int = 500
    """Images in a batch of an evaluation, in each process."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0: at every evaluation."""
    sync_bn: bool = False
    """BatchNorm statistics over all processes (CUDA)."""

    def __post_init__(self) -> None:
        _check_numbers(_flat(dataclasses.asdict(self)))
        if self.optim.accumulate > self.batch_size:
            raise ValueError(
                f"`accumulate` must be between 1 and `batch_size` (={self.batch_size}), "
                f"got {self.optim.accumulate}"
            )
        sgd = self.optim.optimizer == "sgd"
        if sgd and self.optim.nesterov and not self.optim.momentum:
            raise ValueError(
                f"`momentum` must be above 0 with `nesterov`, got {self.optim.momentum}"
            )
        if self.sync_bn and self.model.bn_group is not None:
            raise ValueError(
                f"`bn_group` must not be given with `sync_bn`, got {self.model.bn_group}"
            )
        if self.sync_bn and self.optim.accumulate > 1:
            # shares of a batch may differ by an image, and then so may their numbers of pieces
            raise ValueError(f"`accumulate` must be 1 with `sync_bn`, got {self.optim.accumulate}")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"


def _check_numbers(fields: dict[str, Any]) -> None:
    """Raise for the first number out of its range; what is None was not given."""
    given = {name: value for name, value in fields.items() if value is not None}
    for name, least in AT_LEAST.items():
        if given.get(name, least) < least:
            raise ValueError(f"`{name}` must be at least {least}, got {given[name]}")
    for name in NOT_NEGATIVE:
        if not 0 <= given.get(name, 0) < math.inf:
            raise ValueError(f"`{name}` must be finite and not negative, got {given[name]}")
    for name in SHARES:
        if not 0 <= given[name] < 1:
            raise ValueError(f"`{name}` must be in [0, 1), got {given[name]}")
    if not 0 <= given["cutmix"] <= 1:
        raise ValueError(f"`cutmix` must be in [0, 1], got {given['cutmix']}")
    if given["seed"] >= LARGEST_SEED:
        raise ValueError(f"`seed` must be below 2**63, got {given['seed']}")
    if not 1 <= given.get("iterations", 1) <= MOST_ITERATIONS:
        raise ValueError(
            f"`iterations` must be between 1 and {MOST_ITERATIONS}, got {given['iterations']}"
        )
    if any(milestone < 0 for milestone in given["milestones"]):
        raise ValueError(f"`milestones` must not be negative, got {given['milestones']}")


def differences(config: Config, saved: dict[str, Any]) -> list[str]:
    """Fields in which a config departs from a saved one, those that a user most likely typed first.

    As '`name` is … there and … here'. A field that an older version did not know has its default
    there.
    """
    here = _flat(json.loads(config.to_json()))
    there = _flat(json.loads(Config().to_json())) | _flat(saved)
    names = [*DECISIVE, *here, *there]
    return [
        f"`{name}` is {there.get(name)!r} there and {here.get(name)!r} here"
        for name in sorted(dict.fromkeys(names), key=lambda name: name == "experiment")
        if here.get(name) != there.get(name)
        and not (name == "data" and _same_folder(here[name], there[name]))
    ]


def _same_folder(here: str, there: str) -> bool:
    """Whether two ways to write `data` lead to one folder of images."""
    from capsroute.data import list_datasets  # late: with it comes PyTorch

    if {here, there} & {*list_datasets()}:
        return False
    return Path(here).expanduser().resolve() == Path(there).expanduser().resolve()


def load_config(path: Path) -> Config:
    """A config from a run's config.json."""
    saved = read_json(path)
    parts = {"model": ModelConfig, "data": DataConfig, "optim": OptimConfig}
    try:
        nested = {name: part(**_tuples(saved.pop(name))) for name, part in parts.items()}
        return Config(**saved, **nested)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} must be a run's config.json: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of a run, or a one-line ValueError that names it."""
    try:
        value = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be a run's {path.name}: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must be a run's {path.name}, got {type(value).__name__}")
    return value


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()}


def _flat(nested: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= value if isinstance(value, dict) else {key: value}
    return flat
