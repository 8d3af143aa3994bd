"""The models: a registry, and one function for each."""

from capsroute.models import cnn, dynamic, em, inverted  # importing registers their models
from capsroute.models.base import CapsuleClassifier, ImageClassifier, Routing, Task
from capsroute.models.factory import create_model, load_backbone, load_model
from capsroute.models.registry import ModelInfo, list_models, model_info, register
from capsroute.models.weights import save_model

__all__ = [
    "CapsuleClassifier",
    "ImageClassifier",
    "ModelInfo",
    "Routing",
    "Task",
    "cnn",
    "create_model",
    "dynamic",
    "em",
    "inverted",
    "list_models",
    "load_backbone",
    "load_model",
    "model_info",
    "register",
    "save_model",
]
