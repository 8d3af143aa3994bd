"""What to say about an optional dependency that is missing or does not import."""

import importlib.util
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]


def install_hint(extra: str) -> str:
    """The command that installs an extra of this package, from its checkout if it runs from one."""
    constraints = CHECKOUT / "constraints.txt"
    if constraints.is_file() and (CHECKOUT / "pyproject.toml").is_file():
        return f'pip install -c "{constraints}" -e "{CHECKOUT}[{extra}]"'
    return f'pip install "capsroute[{extra}]"'


def why_unusable(package: str, extra: str, error: Exception) -> str:
    """What is wrong with a package whose import raised, worded to follow `needs PACKAGE, which`."""
    if importlib.util.find_spec(package) is None:
        return f"is not installed: {install_hint(extra)}"
    reason = " ".join(str(error).split()) or type(error).__name__
    return f"is installed but cannot be imported: {reason}"
