"""An explanation as one HTML page that needs nothing else: no script, no outside resource."""

from html import escape

from PIL import Image
from torch import Tensor

from capsroute.explain.explanation import Explanation, overlay, picture, png_uri
from capsroute.explain.heat import MAPS
from capsroute.explain.tree import Placed, place

PATCH, GAP, LEVEL = 56, 14, 104  # pixels of a patch, between two, between levels
LEFT = 66  # for the names of the layers

STYLE = """
:root { color-scheme: light dark; --text: #1b1b1f; --soft: #5b5b66; --line: #d9d9e0;
  --ground: #fff; --card: #f6f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --text: #ececf1; --soft: #a5a5b0; --line: #3a3a44; --ground: #16161a; --card: #202027; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 62rem; color: var(--text);
  background: var(--ground); font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.35rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1rem 0 .25rem; }
p { margin: .25rem 0; max-width: 45rem; } .soft, figcaption { color: var(--soft); }
.note { border-left: 4px solid var(--line); padding: .25rem .75rem; }
.maps { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; }
@media (min-width: 40rem) { .maps { grid-template-columns: repeat(auto-fill, 15rem); } }
figure { margin: 0; max-width: 16rem; }
.stack { position: relative; aspect-ratio: var(--ratio); background: #000; }
.stack img { position: absolute; inset: 0; width: 100%; height: 100%; image-rendering: pixelated; }
.stack .dim { opacity: .45; }
figcaption b, h3 b { padding: .05rem .45rem; border-radius: .3rem; color: #fff; }
.scroll { overflow-x: auto; background: var(--card); border-radius: .5rem; padding: .5rem; }
.scroll:focus-visible { outline: 3px solid #56b4e9; }
svg { display: block; margin: 0 auto; width: 100%; height: auto; }
svg text { font: 14px system-ui, sans-serif; fill: var(--text); }
svg .class { fill: #fff; font-weight: 700; font-size: 16px; }
svg .label { paint-order: stroke; stroke: var(--card); stroke-width: 4px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); }
tbody th { font-weight: 400; } s { color: var(--soft); }
@media (max-width: 40rem) { /* a row becomes a list, which every screen is wide enough for */
  table, tbody, tr, th, td { display: block; border: 0; }
  thead { position: absolute; clip-path: inset(50%); }
  tr { padding: .4rem 0; border-bottom: 1px solid var(--line); }
  tr:last-child { border: 0; }
  th, td { padding: .1rem 0; } tbody th { font-weight: 700; }
  td { display: flex; justify-content: space-between; gap: 1rem; text-align: right; }
  td::before { content: attr(data-head); flex: none; color: var(--soft); }
}
summary { cursor: pointer; margin: .5rem 0; }
"""


def page(explanation: Explanation, image: Tensor) -> str:
    """The page for an explanation and its prepared image (C, H, W)."""
    original = picture(image)
    rounds = explanation.iterations
    how_often = "" if rounds is None else f", {rounds} iteration{'s' * (rounds > 1)}"
    body = [
        f"<h1>Predicted: {escape(explanation.answer)}</h1>",
        f'<p class="soft">{escape(explanation.model)}{how_often}</p>',
        *(f'<p class="note">{escape(note)}</p>' for note in explanation.notes()),
        _maps(explanation, original),
        "<h2>What was made of what</h2>",
        "<p>The links that gave most to each class. A percentage is the child's part of all that "
        f"spoke for its parent; the pictures show {escape(explanation.patches)}.</p>",
        *(_tree(explanation, index, original) for index in explanation.classes),
        _decisions(explanation),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(f'{explanation.model}: {explanation.answer}')}</title>\n"
        f"<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _maps(explanation: Explanation, original: Image.Image) -> str:
    base, ratio = png_uri(original), f"{original.width}/{original.height}"
    figures = [
        f'<figure><div class="stack" style="--ratio:{ratio}"><img src="{base}" '
        'alt="the image as the model sees it"></div><figcaption>the image, '
        f"{original.width}×{original.height} pixels</figcaption></figure>"
    ]
    for index in explanation.classes:
        name, colour = escape(explanation.class_names[index]), explanation.colour(index)
        heat = png_uri(overlay(explanation.heat[index], colour))
        told = f": {told}" if (told := explanation.told_from(index)) else ""
        figures.append(
            f'<figure><div class="stack" style="--ratio:{ratio}">'
            f'<img class="dim" src="{base}" alt=""><img src="{heat}" '
            f'alt="heat map of class {name}: {_whereabouts(explanation, index)}"></div>'
            f'<figcaption><b style="background:{colour}">{name}</b> '
            f"{100 * explanation.probabilities[index]:.1f} %{escape(told)}</figcaption></figure>"
        )
    meaning = (MAPS[explanation.map].__doc__ or "").split("\n")[0]
    return (
        "<h2>Where each class comes from</h2>\n"
        f"<p>Heat map <code>{escape(explanation.map)}</code>: {escape(meaning)} The hottest pixel "
        f'of each class is opaque.</p>\n<div class="maps">{"".join(figures)}</div>'
    )


def _whereabouts(explanation: Explanation, index: int) -> str:
    """Where the heat's centre lies, in words."""
    heat = explanation.heat[index]
    if not heat.sum() > 0:
        return "no heat"
    height, width = heat.shape
    row = (heat.sum(axis=1) @ range(height)) / heat.sum() / height
    column = (heat.sum(axis=0) @ range(width)) / heat.sum() / width
    vertical = "top" if row < 0.4 else "bottom" if row > 0.6 else "middle"
    horizontal = "left" if column < 0.4 else "right" if column > 0.6 else "centre"
    return f"mostly {vertical} {horizontal}"


def _tree(explanation: Explanation, index: int, original: Image.Image) -> str:
    placed = place(explanation.trees[index])
    depth, colour = len(explanation.layers), explanation.colour(index)
    name = escape(explanation.class_names[index])
    leaves = sum(1 for item in placed if not item.node.children)
    width = max(leaves * (PATCH + GAP), 240)
    height = depth * LEVEL + PATCH + 24
    parts = [
        _row_name(explanation.layer_name(depth - level), level * LEVEL + 28)
        for level in range(depth + 1)
    ]
    at = [(LEFT + item.x * width, item.level * LEVEL + 28) for item in placed]
    labels = []
    for item, (x, y) in zip(placed, at, strict=True):
        if item.parent is not None:
            px, py = at[item.parent]
            share = item.node.share
            parts.append(
                f'<line x1="{px:.1f}" y1="{py}" x2="{x:.1f}" y2="{y}" stroke="{colour}" '
                f'stroke-width="{1 + 14 * share:.1f}" stroke-opacity=".55"/>'
            )
            labels.append(
                f'<text class="label" text-anchor="middle" x="{(px + 2 * x) / 3:.1f}" '
                f'y="{(py + 2 * y) / 3 - 14:.1f}">{100 * share:.0f} %</text>'
            )
    parts += [
        _node(item, x, y, name, colour, original) for item, (x, y) in zip(placed, at, strict=True)
    ]
    return (
        f'<h3>Class <b style="background:{colour}">{name}</b></h3>\n'
        f'<div class="scroll" tabindex="0" role="region" aria-label="parse tree of class {name}">'
        f'<svg viewBox="0 0 {LEFT + width} {height}" role="img" '
        f'style="max-width:{LEFT + width}px;min-width:{0.55 * (LEFT + width):.0f}px" '
        f'aria-label="parse tree of class {name}; the list below says the same">'
        f"{''.join(parts)}{''.join(labels)}</svg></div>\n"
        f'<p class="soft">{escape(explanation.tree_caption(index))}.</p>\n'
        f"{_link_list(explanation, index)}"
    )


def _row_name(name: str, y: int) -> str:
    """A layer's name in two lines."""
    first, rest = name.split(" ", 1)
    return f'<text x="0" y="{y - 4}">{first}<tspan x="0" dy="17">{rest}</tspan></text>'


def _node(item: Placed, x: float, y: float, name: str, colour: str, original: Image.Image) -> str:
    if item.level == 0:
        wide = 24.0 + 9 * len(name)
        return (
            f'<rect x="{x - wide / 2:.1f}" y="{y - 16}" width="{wide}" height="32" rx="8" '
            f'fill="{colour}"/><text class="class" text-anchor="middle" x="{x:.1f}" '
            f'y="{y + 5}">{name}</text>'
        )
    top, left, bottom, right = item.node.capsule.shown
    patch = png_uri(original.crop((left, top, right, bottom)))
    longest = max(bottom - top, right - left)
    wide, high = PATCH * (right - left) / longest, PATCH * (bottom - top) / longest
    place_and_size = (
        f'x="{x - wide / 2:.1f}" y="{y - high / 2:.1f}" width="{wide:.1f}" height="{high:.1f}"'
    )
    return (
        f'<image href="{patch}" {place_and_size} preserveAspectRatio="none" '
        f'style="image-rendering:pixelated"/><rect {place_and_size} fill="none" '
        f'stroke="{colour}" stroke-width="2"/>'
    )


def _link_list(explanation: Explanation, index: int) -> str:
    rows = []
    for link in explanation.links:
        if link.class_index != index:
            continue
        child, box = link.child, link.child.box
        parent = explanation.layer_name(link.parent.layer)
        rows.append(
            [
                f"{explanation.layer_name(child.layer)}, row {child.row}, column {child.column}, "
                f"capsule {child.capsule}",
                f"{parent}, row {link.parent.row}, column {link.parent.column}, "
                f"capsule {link.parent.capsule}",
                f"{100 * link.share:.1f}&nbsp;%",
                f"{link.coefficient:.3f}",
                f"{box.top}–{box.bottom - 1}, {box.left}–{box.right - 1}",
            ]
        )
    heads = ["child", "parent", "part", "coefficient", "sees rows, columns"]
    links = _table("links", heads, rows)
    return f"<details><summary>The links as a table</summary>{links}</details>"


def _table(label: str, heads: list[str], rows: list[list[str]]) -> str:
    """Cells, each with its column's name for screens too narrow for columns."""
    columns = "".join(f'<th scope="col">{head}</th>' for head in heads)
    body = []
    for first, *others in rows:
        pairs = zip(heads[1:], others, strict=True)
        cells = "".join(f'<td data-head="{head}">{cell}</td>' for head, cell in pairs)
        body.append(f'<tr><th scope="row">{first}</th>{cells}</tr>')
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table>'
        f"<thead><tr>{columns}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _decisions(explanation: Explanation) -> str:
    rounds = max(len(layer.entropy) for layer in explanation.layers)
    iterations = [f"iteration {number + 1}" for number in range(rounds)]
    rows = []
    for layer in explanation.layers:
        entropy = [
            f"{value:.3f}" if number < layer.used else f"<s>{value:.3f}</s>"
            for number, value in enumerate(layer.entropy)
        ]
        never = "–" if layer.never_win is None else f"{100 * layer.never_win:.0f} %"
        entropy += [""] * (rounds - len(entropy))
        rows.append([explanation.layer_name(layer.layer), *entropy, layer.state, never])
    heads = ["layer", *iterations, "routing", "capsules that never win"]
    return (
        "<h2>How decided the routing is</h2>\n"
        "<p>Entropy of a child's coefficients, averaged, in units of log M: 1 is shared evenly, 0 "
        "is all to one parent. Struck out: never reaches the scores.</p>\n"
        + _table("entropy by layer", heads, rows)
    )
