"""What to type for an optional dependency that is missing."""

from pathlib import Path

CHECKOUT = Path(__file__).parents[2]


def install_hint(extra: str) -> str:
    """The command that installs an extra of this package, from its checkout if it runs from one."""
    constraints = CHECKOUT / "constraints.txt"
    if constraints.is_file() and (CHECKOUT / "pyproject.toml").is_file():
        return f'pip install -c "{constraints}" -e "{CHECKOUT}[{extra}]"'
    return f'pip install "capsroute[{extra}]"'
