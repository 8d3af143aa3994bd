"""What mkdocs fills in when it builds the pages, so that it cannot grow stale."""

import contextlib
import io
import os
import re
from typing import Any

from capsroute import cli

REPOSITORY_LINK = re.compile(r"\]\((?!http|#|\w+\.md|pictures/)([^)]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """`<!-- help: train -->` becomes what `capsroute train --help` prints."""
    return re.sub(r"<!-- help: ([\w-]*) -->", lambda match: _help(match[1]), markdown)


def _help(command: str) -> str:
    arguments = [command, "--help"] if command else ["--help"]
    os.environ["COLUMNS"] = "96"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        cli.main(arguments)
    return f"```text\n{printed.getvalue().strip()}\n```"
