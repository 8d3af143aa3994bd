"""Scripts of tools/, imported as tests need them."""

import importlib.util
from pathlib import Path

TOOLS = Path(__file__).parents[1] / "tools"


def load_tool(name):
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
