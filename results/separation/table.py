"""Writes table.md from the JSON files beside it: `python results/separation/table.py`."""

import json
from pathlib import Path

HERE = Path(__file__).parent
ITERATIONS = (1, 2, 4)


def load(split: str) -> list[dict]:
    names = [f"inverted_small_multimnist_r{count}_{split}.json" for count in ITERATIONS]
    return [json.loads((HERE / name).read_text()) for name in names]


def table(tests: list[dict], choices: list[dict]) -> str:
    heads = [f"{count} iteration{'s' * (count > 1)}" for count in ITERATIONS]
    lines = [
        "| map | " + " | ".join([*heads, *(f"chosen on, {count}" for count in ITERATIONS)]) + " |",
        "|---|" + "---|" * 2 * len(ITERATIONS),
    ]
    maps = tests[1]["maps"]
    for name in sorted(maps, key=lambda name: -maps[name]["share"]):
        cells = [f"{d['maps'][name]['share']:.3f} ± {d['maps'][name]['error']:.3f}" for d in tests]
        cells += [f"{d['maps'][name]['share']:.3f}" for d in choices]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    named = [f"{d['both_digits_named_percent']:.1f} %" for d in (*tests, *choices)]
    lines.append("| *both digits named* | " + " | ".join(named) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (HERE / "table.md").write_text(table(load("test"), load("choice")))
