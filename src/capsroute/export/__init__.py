"""Models to take away: ONNX, torch.export, safetensors, and the Hugging Face hub (hub.py).

export_model(model, "onnx", "model.onnx")      # checked against the model before it is there
description, run = load_exported("model.onnx")
"""

from capsroute.export.files import FORMATS, export_model
from capsroute.export.loading import load_exported

__all__ = ["FORMATS", "export_model", "load_exported"]
