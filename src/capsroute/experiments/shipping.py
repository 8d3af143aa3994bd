"""From a finished run to weights inside the package, with a model card that says what they are."""

import tempfile
from pathlib import Path

from capsroute.data import load_dataset
from capsroute.experiments.cards import card_text, is_of_run
from capsroute.files import write_whole
from capsroute.models.factory import load_model
from capsroute.models.pretrained import FILES, pack
from capsroute.progress import Progress
from capsroute.train.checkpoint import RunFolder
from capsroute.train.config import load_config
from capsroute.train.evaluation import Evaluation, evaluate


def ship(
    run: Path,
    results: Path,
    folder: Path = FILES,
    data_root: Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Pack the weights of a finished run, measure what was packed, and write its card.

    What ships now is replaced only when the new file measures as its run did, and when the
    evidence in `results`, which the card names, is that of this very run.
    """
    source = RunFolder(run)
    if not source.summary.is_file():
        raise ValueError(f"`run` must be the folder of a finished run, got {run}: no summary.json")
    config, summary = load_config(source.config), source.read_summary()
    _check_evidence(source.summary, results / summary["experiment"] / f"seed{summary['seed']}")
    test = load_dataset(config.data.data, root=data_root).test
    with tempfile.TemporaryDirectory() as scratch:
        packed = pack(load_model(source.model), Path(scratch))
        model = load_model(packed)
        measured = evaluate(
            model, test, batch_size=500, device="cpu", crop=config.data.crop, progress=progress
        )
        _check_weights(run, summary["test_accuracy_last"], measured)
        path = folder / packed.name
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, packed.read_bytes())
    write_whole(path.with_suffix(".md"), card_text(model, config, summary, measured).encode())
    return path


def _check_evidence(summary: Path, evidence: Path) -> None:
    kept = evidence / summary.name
    if not kept.is_file():
        raise ValueError(f"`run` must have its evidence in {evidence}, got {summary.parent}: none")
    if kept.read_bytes() != summary.read_bytes():
        raise ValueError(
            f"`run` must be the one whose evidence is in {evidence}, got {summary.parent}: "
            f"{summary.name} differs"
        )


def _check_weights(run: Path, last: float, measured: Evaluation) -> None:
    if not is_of_run(measured.accuracy, last, measured.images):
        raise ValueError(
            f"`run` must hold the weights of its last epoch, got {run}: they get "
            f"{measured.accuracy:.2f} %, its summary says {last:.2f} %"
        )
