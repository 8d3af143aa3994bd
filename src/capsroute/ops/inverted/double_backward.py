"""What every step that forms its votes again in backward does when differentiated twice."""

from typing import Any, NoReturn


def refuse_double_backward(ctx: Any, *grad_outputs: Any) -> NoReturn:
    """The backward of a backward that has none."""
    raise RuntimeError("a routing step can be differentiated twice with impl='reference' only")
