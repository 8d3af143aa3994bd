"""What a run is made of. Frozen dataclasses; the command line overrides any field by its name."""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from capsroute.data import list_datasets

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
WITHOUT_EFFECT = ("checkpoint_every",)  # on what is trained, so a run may go on with another
SHARES = ("validation", "momentum", "warmup", "label_smoothing", "ema")


@dataclass(frozen=True)
class ModelConfig:
    """The model, and changes to its registered options."""

    model: str = "inverted_small_multimnist"
    """A model that `capsroute models` lists."""
    iterations: int | None = None
    """Routing iterations, if not the model's own."""
    schedule: Literal["concurrent", "sequential"] | None = None
    """Route layers at once or one after another (inverted models)."""
    bn_group: int | None = None
    """Images per BatchNorm group (models with BatchNorm); the paper's recipe has 16."""
    layer_norm: bool | None = None
    """LayerNorm on poses; off in ablation A (inverted models)."""
    activations: bool | None = None
    """Capsule activations; on in ablation C (inverted models)."""
    initial_poses: Literal["zeros", "random", "learned"] | None = None
    """Parents' poses before the first iteration (inverted models)."""
    windows: Literal["sliding", "mixed"] | None = None
    """Windows of convolutional capsules; mixed: as in the authors' first release (inverted)."""
    backbone: str | None = None
    """Backbone, such as timm/resnet50 (inverted ResNet models)."""
    pretrained: str | None = None
    """Start from the weights of a run, checkpoint or pretrained model, or timm (the backbone's)."""

    def options(self) -> dict[str, Any]:
        """Keyword arguments for `create_model`: what was given."""
        fields = [key for key in self.__dataclass_fields__ if key not in ("model", "pretrained")]
        return {key: getattr(self, key) for key in fields if getattr(self, key) is not None}


@dataclass(frozen=True)
class DataConfig:
    """The images and their augmentation."""

    data: str = "diverse_multimnist"
    """cifar10, cifar100, mnist, fashion_mnist, diverse_multimnist, or a folder of images."""
    data_root: str | None = None
    """Folder of downloaded datasets. (default: $CAPSROUTE_DATA or ~/.cache/capsroute)"""
    image_size: int | None = None
    """Side to resize a folder's images to. (default: worked out from the images)"""
    strict: bool = False
    """Treat a broken image file as an error instead of skipping it."""
    validation: float = 0.0
    """Fraction of the training images to set aside for validation."""
    padding: int = 0
    """Black pixels to add on every side before a random crop."""
    flip: bool = False
    """Mirror images at random, each with probability 1/2."""
    cutout: int = 0
    """Side of the square to black out in each image; 0 for none."""
    cutmix: float = 0.0
    """Fraction of images that get a rectangle of another image, and its class in proportion."""
    crop: int | None = None
    """Side of a square crop, random in training, else central."""


@dataclass(frozen=True)
class OptimConfig:
    """The loss and how it is minimised."""

    loss: Literal["auto", "cross_entropy", "binary_cross_entropy", "margin", "spread"] = "auto"
    """`auto`: the loss that the model's family was published with."""
    optimizer: Literal["sgd", "adam", "muon"] = "sgd"
    """SGD with momentum, Adam, or Muon, which equalises the singular values of an update."""
    lr: float = 0.1
    """Peak learning rate."""
    momentum: float = 0.9
    """Momentum of SGD and Muon."""
    nesterov: bool = False
    """Use Nesterov momentum (SGD, Muon)."""
    weight_decay: float = 5e-4
    """L2 penalty on all parameters, as in the authors' code (Muon: they shrink by lr times it)."""
    capsule_decay: float | None = None
    """Weight decay of the capsule layers, if different."""
    lr_schedule: Literal["step", "cosine", "constant"] = "step"
    """`step`: divide by 10 at each milestone; `cosine`: fall to zero by the end."""
    milestones: tuple[int, ...] = (150, 250)
    """Epochs after which `step` divides the learning rate by 10."""
    warmup: float = 0.0
    """Fraction of the run over which the learning rate rises from zero."""
    label_smoothing: float = 0.0
    """Fraction of the target spread over all classes; multi-label targets move towards 0.5."""
    ema: float = 0.0
    """Decay of a moving average of the weights, evaluated in their place; 0 for none."""
    clip: float = 0.0
    """Clip the gradient to this norm; 0 for no limit."""
    accumulate: int = 1
    """Pieces to split each batch into, to save memory."""


@dataclass(frozen=True)
class Config:
    """A whole run, as asked for.

    config.json keeps it so, since the same command must find its own run on any machine;
    what was left open is in summary.json, under `resolved`.
    """

    experiment: str = "inverted_small_multimnist"
    """Name of the run: the preset's, or that of the folder of images."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    batch_size: int = 128
    """Images per step, over all processes."""
    epochs: int = 350
    """Passes over the training images (DiverseMultiMNIST: 60,000 images each)."""
    steps: int | None = None
    """Length of the run in steps instead of epochs."""
    seed: int = 0
    """Seed for the initial weights, the order of the images and their augmentation."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 covers convolutions and stored poses; agreement, softmax and norms stay float32."""
    eval_every: int = 0
    """Steps between evaluations; 0 for every epoch."""
    eval_batch_size: int = 500
    """Images per evaluation batch, in each process."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 for every evaluation."""
    sync_bn: bool = False
    """Compute BatchNorm statistics over all processes (CUDA)."""

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
    """Fields in which a config departs from a saved one, beginning with what a user likely typed.

    As '`name` is … there and … here'. A field that an older version did not know has its default
    there. How often a run is saved is no difference.
    """
    here = _flat(json.loads(config.to_json()))
    there = _flat(json.loads(Config().to_json())) | _flat(saved)
    names = [name for name in (*DECISIVE, *here, *there) if name not in WITHOUT_EFFECT]
    return [
        f"`{name}` is {_shown(there.get(name))} there and {_shown(here.get(name))} here"
        for name in sorted(dict.fromkeys(names), key=lambda name: name == "experiment")
        if here.get(name) != there.get(name)
        and not (name == "data" and _same_folder(here[name], there[name]))
    ]


def _shown(value: Any) -> str:
    """A value of the config as a user would put it, who never types None."""
    return "not given" if value is None else repr(value)


def _same_folder(here: str, there: str) -> bool:
    """Whether two ways to write `data` lead to one folder of images."""
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
