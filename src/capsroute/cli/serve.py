"""`capsroute serve`"""

import math
import os
import sys
from dataclasses import dataclass
from typing import Annotated

import torch
import tyro

from capsroute.cli.errors import UsageError, as_typed
from capsroute.cli.inputs import load_predictor
from capsroute.cli.parsing import optional, parse
from capsroute.extras import install_hint

EVERYWHERE = ("0.0.0.0", "::")


@dataclass(frozen=True)
class Options:
    """Serve a model as a web page and a JSON API: draw or drop an image and see what it saw.

    Listens on this machine only, unless --host says otherwise. Ctrl-C answers the requests in
    flight, then stops.

    For example `capsroute serve inverted_small_multimnist`,
    `capsroute serve runs/pets --port 9000`,
    `capsroute serve model.safetensors --host 0.0.0.0 --allow-host pets.example`; then
    `curl -F image=@cat.jpg http://127.0.0.1:8000/predict`.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run's folder, a checkpoint, a pretrained model's name, or an exported file."""
    host: Annotated[str, tyro.conf.arg(metavar="HOST")] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every network that this machine is on."""
    port: Annotated[int, tyro.conf.arg(metavar="PORT")] = 8000
    """Port to listen on; 0 for any free one."""
    allow_host: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME")] = ()
    """Host names by which browsers may reach this server, besides IP addresses and localhost."""
    iterations: Annotated[int | None, optional("N")] = None
    """Routing iterations. (default: the model's own)"""
    device: Annotated[str, tyro.conf.arg(metavar="DEVICE")] = "auto"
    """auto, cpu or cuda."""
    threads: Annotated[int | None, optional("N")] = None
    """CPU threads for the model. (default: every core but one, which answers requests)"""
    max_batch: Annotated[int, tyro.conf.arg(metavar="N")] = 32
    """Maximum images to run through the model together; 1 for no batching."""
    max_wait: Annotated[float, tyro.conf.arg(metavar="MS")] = 2.0
    """Milliseconds that an image waits for others already on their way."""
    queue: Annotated[int, tyro.conf.arg(metavar="N")] = 64
    """Maximum predictions in progress; further ones get a 503."""
    timeout: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 10.0
    """Time limit for reading an upload, and again for answering it."""
    max_upload: Annotated[float, tyro.conf.arg(metavar="MIB")] = 8.0
    """Maximum size of an upload, in MiB."""
    max_pixels: Annotated[int, tyro.conf.arg(metavar="N")] = 25_000_000
    """Maximum pixels in an image; a larger one is refused before it is decoded."""


def main(arguments: list[str]) -> None:
    options = parse(Options, "serve", arguments)
    try:
        from capsroute.serve import Limits, create_app, listen, run
        from capsroute.serve.server import address_of, is_loopback
    except ModuleNotFoundError as error:
        raise UsageError(f"`capsroute serve` needs {error.name}: {install_hint('serve')}") from None
    _check_units(options)
    with as_typed(
        max_batch="--max-batch", predictions="--queue", seconds="--timeout", pixels="--max-pixels"
    ):
        limits = Limits(
            max_batch=options.max_batch,
            max_wait=options.max_wait / 1000,
            predictions=options.queue,
            seconds=options.timeout,
            upload=int(options.max_upload * 2**20),
            pixels=options.max_pixels,
        )
    torch.set_num_threads(_threads(options.threads))
    predictor = load_predictor(options.model, iterations=options.iterations, device=options.device)
    # before the model warms up: a port that is taken is told at once
    with as_typed(port="--port"):
        sock = listen(options.host, options.port)
    names = [*options.allow_host, *([] if options.host in EVERYWHERE else [options.host])]
    app = create_app(predictor, limits, allowed_hosts=names)
    if not is_loopback(sock):
        print(
            f"warning: listening on {options.host}: whoever reaches this machine can use the "
            "model; there is no password and no encryption",
            file=sys.stderr,
        )
    run(
        app,
        sock,
        on_ready=lambda: print(
            f"{predictor.title} on {address_of(sock)} (API: /docs; Ctrl-C stops)", flush=True
        ),
    )
    print("stopped", flush=True)


def _check_units(options: Options) -> None:
    """What `Limits` would refuse in seconds and bytes."""
    if not 0 <= options.max_wait < math.inf:
        raise UsageError(f"`--max-wait` must be 0 milliseconds or more, got {options.max_wait:g}")
    if not 1 / 2**20 <= options.max_upload < math.inf:
        raise UsageError(
            f"`--max-upload` must be a number of MiB above 0, got {options.max_upload:g}"
        )


def _threads(asked: int | None) -> int:
    """With all cores the model and the web server would push each other off them."""
    if asked is not None and asked < 1:
        raise UsageError(f"`--threads` must be at least 1, got {asked}")
    return asked or max(1, (os.cpu_count() or 1) - 1)
