"""What routed where: heat maps, the parse tree, and how decided the routing is.

    explanation = explain(model, image)          # image (C, H, W), floats in [0, 1]
    draw_explanation(explanation, image)         # PNG bytes
    page(explanation, image)                     # one HTML page that needs nothing else

docs/explain.md says what the pictures mean, and measures how far they can be believed.
"""

from capsroute.explain.explanation import Explanation, explain
from capsroute.explain.heat import DEFAULT_MAP, MAPS, ROUTING_MAPS, default_map
from capsroute.explain.page import page
from capsroute.explain.picture import draw_explanation

__all__ = [
    "DEFAULT_MAP",
    "MAPS",
    "ROUTING_MAPS",
    "Explanation",
    "default_map",
    "draw_explanation",
    "explain",
    "page",
]
