"""Models on the Hugging Face hub (extra `hub`), by huggingface_hub's own mixin.

    HubModel(model).save_pretrained("folder")               # weights, config.json, README.md
    HubModel.of("runs/pets", license="cc-by-4.0").push_to_hub("someone/pets")
    model = HubModel.from_pretrained("someone/pets").model

The weights are the safetensors file that `capsroute predict` takes, so a downloaded folder is a
model too.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from capsroute.extras import why_unusable

try:
    from huggingface_hub import HfApi, ModelCard, ModelCardData, ModelHubMixin, hf_hub_download
except ImportError as error:
    why = why_unusable("huggingface_hub", "hub", error)
    raise ImportError(f"the hub needs huggingface_hub, which {why}") from error

import capsroute
from capsroute.models.base import ImageClassifier, count_parameters
from capsroute.models.factory import load_model
from capsroute.models.sources import find_checkpoint
from capsroute.models.weights import read_metadata, save_model

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
OURS = "capsroute"
"""What config.json holds alone: a run's own is another file of the same name."""
NAMED = 100  # classes that a card lists

CARD = """---
{data}
---

# {name}

{kind} of {height}×{width} {colour} images into {classes} classes{routing}, made with capsroute.

| | |
|---|---|
{rows}

## Use it

```python
from capsroute.export.hub import HubModel

model = HubModel.from_pretrained("{repo_id}").model.eval()
scores = model(images)  # floats in [0, 1], (batch, {channels}, {height}, {width})
probabilities = model.probabilities(scores)
```

The folder is a model for the command line as well: `capsroute predict FOLDER photo.jpg`,
`capsroute explain FOLDER photo.jpg`.
"""


class HubModel(ModelHubMixin, library_name="capsroute", tags=["image-classification"]):
    """A classifier that can be saved for the Hugging Face hub, pushed to it and loaded from it.

    Args:
        model: in any mode and on any device.
        license: licence of the weights, by the hub's name for it; none on the card by default.
        results: rows of the card's table, such as `{"test accuracy": "93.1 %"}`.
    """

    def __init__(
        self,
        model: ImageClassifier,
        *,
        license: str | None = None,
        results: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.license = license
        self.results = dict(results or {})

    @classmethod
    def of(cls, source: str | Path, *, license: str | None = None, **changes: Any) -> "HubModel":
        """Load a run's folder, a checkpoint or shipped weights; a run's results go on the card.

        `changes` are arguments of `create_model`, such as `iterations`.
        """
        path = find_checkpoint(source, changes.get("iterations"))
        model = load_model(path, **changes)
        summary = path.with_name("summary.json")
        known = path.name == WEIGHTS and summary.is_file()
        results = run_results(json.loads(summary.read_text()), model) if known else None
        return cls(model, license=license, results=results)

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        repo_id: str | None = None,
        model_card_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> str | None:
        """Weights, config.json and, unless there is one, README.md, into a folder.

        Args:
            save_directory: made if need be. Not a run's: its config.json would be lost.
            repo_id: what the card calls the model; the folder's name unless given.
            model_card_kwargs: arguments of `generate_model_card`.
            options: huggingface_hub's own, such as `push_to_hub`.
        """
        folder = Path(save_directory)
        _check_config(folder / CONFIG)
        card = {"repo_id": repo_id or folder.resolve().name, **(model_card_kwargs or {})}
        return super().save_pretrained(folder, repo_id=repo_id, model_card_kwargs=card, **options)

    def push_to_hub(
        self, repo_id: str, *, model_card_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> str:
        """Upload what `save_pretrained` writes; `options` are huggingface_hub's own."""
        if "/" not in repo_id:  # the hub knows whose
            api, private = HfApi(token=options.get("token")), options.get("private")
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        card = {**(model_card_kwargs or {}), "repo_id": repo_id}
        return super().push_to_hub(repo_id, model_card_kwargs=card, **options)

    def _save_pretrained(self, save_directory: Path) -> None:
        path = Path(save_directory) / WEIGHTS
        save_model(self.model, path)
        # nested: the mixin would take an entry `model` for the argument of that name
        text = json.dumps({OURS: read_metadata(path)}, indent=1) + "\n"
        (Path(save_directory) / CONFIG).write_text(text)

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        token: str | bool | None = None,
        **changes: Any,
    ) -> "HubModel":
        """`changes` are arguments of `create_model`, such as `iterations`."""
        changes.pop("model", None)  # of a run's config.json, taken for the argument of that name
        if Path(model_id).is_dir():
            return cls.of(model_id, **changes)
        path = hf_hub_download(
            model_id,
            WEIGHTS,
            revision=revision,
            cache_dir=cache_dir,
            force_download=force_download,
            local_files_only=local_files_only,
            token=token,
        )
        return cls.of(path, **changes)

    def generate_model_card(
        self,
        *,
        repo_id: str | None = None,
        license: str | None = None,
        results: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> ModelCard:
        """What the model is and how to use it; `results` are further rows of its table.

        `repo_id` is what the model is loaded by, and gives the title: a repository or a folder.
        """
        model = self.model
        repo_id = repo_id or model.name
        data = ModelCardData(
            license=license or self.license,
            library_name="capsroute",
            pipeline_tag="image-classification",
            tags=["capsule-networks", "image-classification"],
        )
        iterations = model.iterations
        several = "s" * (iterations != 1)
        text = CARD.format(
            data=data.to_yaml(),
            name=repo_id.split("/")[-1],
            kind="Multi-label classification" if model.task.multilabel else "Classification",
            height=model.image_size[0],
            width=model.image_size[1],
            channels=model.in_channels,
            colour={1: "grey", 3: "colour"}.get(model.in_channels, f"{model.in_channels}-channel"),
            classes=model.num_classes,
            routing=f", {iterations} routing iteration{several}" if iterations else "",
            rows=_rows({**model_facts(model), **self.results, **(results or {})}),
            repo_id=repo_id,
        )
        return ModelCard(text)


def model_facts(model: ImageClassifier) -> dict[str, str]:
    """What a model says of itself, for the card."""
    names = model.class_names or []
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    height, width = model.image_size
    facts = {
        "model": f"`{model.name}`",
        "parameters": f"{count_parameters(model):,}",
        "image size": f"{height}×{width}, channels: {model.in_channels}",
        "classes": ", ".join(names[:NAMED]) + more if names else str(model.num_classes),
        "routing iterations": "" if model.iterations is None else str(model.iterations),
        "capsroute": capsroute.__version__,
    }
    return {name: fact for name, fact in facts.items() if fact}


def run_results(summary: Mapping[str, Any], model: ImageClassifier) -> dict[str, str]:
    """What a run's summary.json tells of its model; nothing of a model that is another now."""
    own = {
        "model": model.name,
        "iterations": model.iterations,
        "params": count_parameters(model),
    }
    if any(summary.get(name) != value for name, value in own.items()):
        return {}
    right = "every label right" if model.task.multilabel else "the class right"
    accuracies = {
        "test": summary.get("test_accuracy_last"),
        "validation": summary.get("val_accuracy"),
    }
    trained = f"{summary['steps']:,} steps, seed {summary['seed']}"
    return {
        "data": Path(summary["dataset"]).name or "a folder",  # not where it lay
        **{
            f"{split} accuracy": f"{accuracy:.2f} % of the images ({right}), after the last step"
            for split, accuracy in accuracies.items()
            if accuracy is not None
        },
        "trained": f"{trained}, {summary['dtype']}, on {summary['device']}",
    }


def _rows(facts: Mapping[str, Any]) -> str:
    """Of a Markdown table, whatever classes are called."""
    return "\n".join(f"| {_cell(name)} | {_cell(fact)} |" for name, fact in facts.items())


def _cell(text: Any) -> str:
    return " ".join(str(text).split()).replace("|", r"\|")


def _check_config(path: Path) -> None:
    """The mixin replaces a config.json; one that is not ours would be lost."""
    if not path.is_file():
        return
    try:
        ours = OURS in dict(json.loads(path.read_text()))
    except (ValueError, TypeError):
        ours = False
    if not ours:
        raise ValueError(
            f"`save_directory` must be a new folder or one saved for the hub, got {path.parent}: "
            f"its {path.name} is another's"
        )
