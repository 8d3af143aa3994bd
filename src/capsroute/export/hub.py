"""Models on the Hugging Face hub (extra `hub`), by huggingface_hub's own mixin.

    HubModel(model).save_pretrained("folder")               # weights, config.json, README.md
    HubModel(model).push_to_hub("someone/some-model")
    model = HubModel.from_pretrained("someone/some-model").model

The weights are the safetensors file that `capsroute predict` takes, so a downloaded folder is a
model too.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from capsroute.extras import install_hint

try:
    from huggingface_hub import ModelCard, ModelCardData, ModelHubMixin, hf_hub_download
except ImportError:
    raise ImportError(
        f"`huggingface_hub` must be installed for the hub: {install_hint('hub')}"
    ) from None

from capsroute.models.base import ImageClassifier
from capsroute.models.weights import load_model, read_metadata, save_model

WEIGHTS = "model.safetensors"
CONFIG = "config.json"

CARD = """---
{data}
---

# {name}

{kind} of {height}×{width} {colour} images into {classes} classes{routing}, made with capsroute
(`pip install capsroute`).

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
    """A classifier that can be saved for the hub, pushed there and loaded from it."""

    def __init__(self, model: ImageClassifier) -> None:
        self.model = model

    def _save_pretrained(self, save_directory: Path) -> None:
        path = Path(save_directory) / WEIGHTS
        save_model(self.model, path)
        # nested: the mixin would take an entry `model` for the argument of that name
        text = json.dumps({"capsroute": read_metadata(path)}, indent=1) + "\n"
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
        folder = Path(model_id)
        if folder.is_dir():
            path = folder / WEIGHTS
        else:
            path = Path(
                hf_hub_download(
                    model_id,
                    WEIGHTS,
                    revision=revision,
                    cache_dir=cache_dir,
                    force_download=force_download,
                    local_files_only=local_files_only,
                    token=token,
                )
            )
        return cls(load_model(path, **changes))

    def generate_model_card(
        self,
        *,
        repo_id: str = "someone/some-model",
        results: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> ModelCard:
        """What the model is and how to use it, with `results` as they are given, if any."""
        model = self.model
        data = ModelCardData(
            license="apache-2.0",
            library_name="capsroute",
            pipeline_tag="image-classification",
            tags=["capsule-networks", "image-classification"],
        )
        facts = {
            "model": model.name,
            "parameters": f"{sum(p.numel() for p in model.parameters()):,}",
            "classes": ", ".join(model.class_names or []) or str(model.num_classes),
            **(results or {}),
        }
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
            rows="\n".join(f"| {name} | {value} |" for name, value in facts.items()),
            repo_id=repo_id,
        )
        return ModelCard(text)
