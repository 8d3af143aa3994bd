"""What a machine lacks an extra for is left out, and said: a GPU machine may have no web server."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("fastapi") else ["serve"]


def pytest_report_header() -> list[str]:
    return [f"left out: tests/{folder}, which needs fastapi" for folder in collect_ignore]
