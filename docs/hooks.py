"""What mkdocs fills in when it builds the pages, so that it cannot grow stale."""

import contextlib
import io
import os
import re
import textwrap
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from capsroute import cli

FIGURES = Path("results/figures")


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """The report's figures lie outside docs/."""
    for figure in sorted(FIGURES.glob("*.png")):
        content = figure.read_bytes()
        files.append(File.generated(config, f"figures/{figure.name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """`<!-- help: train -->` becomes what `capsroute train --help` prints.

    RESULTS.md, which the results page includes, links to files of the repository: its figures come
    along, its evidence is named only. Pages show those figures by their path in the repository.
    """
    if page.file.src_uri == "results.md":
        markdown = Path("RESULTS.md").read_text()
        markdown = markdown.replace(f"]({FIGURES}/", "](figures/")
        markdown = re.sub(r"(?<!!)\[([^\]]+)\]\((?!http|figures/)[^)]+\)", r"`\1`", markdown)
        return markdown
    markdown = markdown.replace(f"](../{FIGURES}/", "](figures/")
    return re.sub(r"<!-- help: ([\w-]*) -->", lambda match: _help(match[1]), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Marks options such as `--iterations`, which browsers would break after their dashes."""
    return re.sub(r"(?<=[\s>])(--\w[\w-]*)", r'<span class="option">\1</span>', html)


def _help(command: str) -> str:
    arguments = [command, "--help"] if command else ["--help"]
    os.environ["COLUMNS"] = "96"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        cli.main(arguments)
    lines = (_wrap(line) for line in printed.getvalue().strip().splitlines())
    return "\n".join(["```text", *lines, "```"])


def _wrap(line: str) -> str:
    """Long lines, which a terminal would wrap, under the column in which their text begins."""
    start = re.match(r" *(\S+  +)?", line).end()  # type: ignore[union-attr]  # matches anything
    return textwrap.fill(line, 110, subsequent_indent=" " * start, break_on_hyphens=False)
