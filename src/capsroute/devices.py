"""Where tensors live: the device that a name stands for."""

import torch


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """The device that `auto`, `cpu` or `cuda` stands for; a ValueError if it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        mac = ": Macs run on the CPU here" if name.startswith("mps") else ""
        raise ValueError(f"`device` must be auto, cpu or cuda, got {name!r}{mac}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"`device` must be available, got {name!r}: PyTorch sees no GPU here")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", local_rank)
    return device
