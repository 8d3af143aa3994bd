"""Every model by its name: the function's name is the model's name."""

import fnmatch
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property

from capsroute.models.base import TASKS, ImageClassifier, Task, count_parameters
from capsroute.models.pretrained import list_pretrained
from capsroute.nearest import nearest

Builder = Callable[..., ImageClassifier]


@dataclass(frozen=True)
class ModelInfo:
    """A registered model and what the paper says of it."""

    name: str
    build: Builder  # build(task, **options)
    family: type[ImageClassifier]
    dataset: str
    task: Task
    stated_parameters: int | None = None  # as the paper's table prints them, or as we counted
    paper_accuracy: float | None = None  # percent, as the paper's table prints it

    @cached_property
    def parameters(self) -> int:
        """Weights of the model as registered; counted by building it where they are not stated."""
        if self.stated_parameters is not None:
            return self.stated_parameters
        return count_parameters(self.build(self.task))

    @property
    def task_arguments(self) -> list[str]:
        """Fields of the task that `create_model` accepts for this model."""
        names = [field.name for field in fields(Task)]
        return [n for n in names if n != "iterations" or self.task.iterations is not None]

    @property
    def options(self) -> list[str]:
        """What the model's function takes: options by name, its family's through `**`."""
        parameters = list(inspect.signature(self.build).parameters.values())[1:]
        named = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
        if len(named) == len(parameters):  # no `**options` for the family's
            return named
        return [*named, *(option for option in self.family.OPTIONS if option not in named)]

    @property
    def summary(self) -> str:
        """First line of the model's docstring."""
        return (inspect.getdoc(self.build) or "").split("\n")[0]


_REGISTRY: dict[str, ModelInfo] = {}


def register(
    family: type[ImageClassifier],
    dataset: str,
    *,
    iterations: int | None = None,
    parameters: int | None = None,
    paper_accuracy: float | None = None,
) -> Callable[[Builder], Builder]:
    """Decorator that registers a model function under its own name.

    The function gets a `Task`, the dataset's with the caller's changes, and options as keywords.

    Args:
        family: class of the model that the function returns; a function with `**options` also
            takes the family's `OPTIONS`.
        dataset: what the model is for by default: `cifar10`, `cifar100` or `diverse_multimnist`.
        iterations: default number of routing iterations; None for a model that does not route.
        parameters: number of weights; counted when needed unless given.
        paper_accuracy: in percent, where a paper states it.
    """
    if dataset not in TASKS:
        raise ValueError(f"`dataset` must be known, got {dataset!r}{nearest(dataset, TASKS)}")
    task = replace(TASKS[dataset], iterations=iterations)

    def add(build: Builder) -> Builder:
        name = build.__name__
        # code that `exec` runs is of no module
        owner = (_REGISTRY[name].build.__module__ if name in _REGISTRY else None) or ""
        if owner.startswith("capsroute.") and owner != build.__module__:
            raise ValueError(f"a model must have a name of its own, got {name!r} of {owner}")
        _REGISTRY[name] = ModelInfo(name, build, family, dataset, task, parameters, paper_accuracy)
        return build

    return add


def list_models(pattern: str = "*", *, pretrained: bool = False) -> list[str]:
    """Sorted names of the models that match a shell pattern; with `pretrained`, of those whose
    weights ship with the package.
    """
    names = sorted(fnmatch.filter(_REGISTRY, pattern))
    if not pretrained:
        return names
    shipped = list_pretrained()
    return [name for name in names if name in shipped]


def model_info(name: str) -> ModelInfo:
    """The registry's entry, or a ValueError with the nearest name."""
    if name in _REGISTRY:
        return _REGISTRY[name]
    raise ValueError(f"`name` must be a registered model, got {name!r}{nearest(name, _REGISTRY)}")
