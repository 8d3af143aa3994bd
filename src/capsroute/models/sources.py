"""What a user may name a trained model by: a run's folder, a checkpoint, a name."""

import difflib
from pathlib import Path

from capsroute.models.pretrained import list_pretrained, shipped
from capsroute.models.registry import list_models, model_info
from capsroute.models.weights import SUFFIX, is_safetensors
from capsroute.nearest import nearest, nearest_path

EXPORTED = (".onnx", ".pt2")
KINDS = "a run's folder, a checkpoint or a pretrained model"


def find_checkpoint(
    source: str | Path, iterations: int | None = None, *, expected: str = KINDS
) -> Path:
    """The safetensors file that a path or a name stands for, or a one-line ValueError.

    `iterations` chooses among the weights that ship under one name; `expected` is what the error
    says a source may be.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        checkpoint = path / "model.safetensors"
        if not checkpoint.is_file():
            raise ValueError(
                f"{path} holds no {checkpoint.name}; expected the folder of a run that has been "
                "evaluated once"
            )
        return checkpoint
    if path.is_file():
        _check_kind(path, expected)
        return path
    if str(source) in [*list_pretrained(), *list_models()]:  # which says so where no weights ship
        return pretrained_path(str(source), iterations)
    raise ValueError(f"{source}: no such model; expected {expected}; {_hint(str(source), path)}")


def pretrained_path(name: str, iterations: int | None = None) -> Path:
    """The weights of a model, trained with so many iterations; its own number unless given."""
    found = {count: path for (model, count), path in shipped().items() if model == name}
    if not found:
        known = list_pretrained()
        hint = (
            f"; they ship for {', '.join(known)}" if name in list_models() else nearest(name, known)
        )
        raise ValueError(f"no weights ship for {name!r}{hint}")
    wanted = model_info(name).task.iterations if iterations is None else iterations
    if wanted not in found:
        choices = ", ".join(map(str, found))
        raise ValueError(
            f"`iterations` must be one of {choices} for the weights that ship for {name}, "
            f"got {wanted}"
        )
    return found[wanted]


def _check_kind(path: Path, expected: str) -> None:
    """Raise for a file of another kind; weights that are damaged are for their reader to tell."""
    if path.suffix in EXPORTED:
        raise ValueError(f"{path} is an exported file; expected {expected}")
    if path.suffix != SUFFIX and not is_safetensors(path):
        raise ValueError(f"{path} is not a model; expected {expected}")


def _hint(source: str, path: Path) -> str:
    """The nearest name, be it of a model or of a file beside the path."""
    names = list_pretrained()
    if close := difflib.get_close_matches(source, names, n=1):
        return f"did you mean {close[0]!r}?"
    if beside := nearest_path(path):
        return f"did you mean {str(beside)!r}?"
    return f"pretrained models: {', '.join(names) or 'none'}"
