"""From a config to all that a run works with: data, model, batches, steps, measurements."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from capsroute.data import Augment, Dataset, EvalBatches, Split, TrainBatches, load_dataset
from capsroute.models import create_model
from capsroute.models.backbones import TimmBackbone
from capsroute.models.base import ImageClassifier
from capsroute.models.factory import load_backbone
from capsroute.models.sources import KINDS, find_checkpoint
from capsroute.models.weights import read_metadata
from capsroute.train.capture import CapturedSteps, Graphs
from capsroute.train.config import Config, ModelConfig
from capsroute.train.distributed import Processes
from capsroute.train.held_out import HeldOut
from capsroute.train.optim import learning_rate
from capsroute.train.reporting import Reporter
from capsroute.train.step import Moment, TrainStep, loss_name, run_step

# A step has hundreds of small kernels: those that can run side by side become one, some 5 % of a
# step. To time each with several shapes of its blocks (max_autotune_pointwise) gains no more on top
# and takes a quarter longer to compile (benchmarks/kernels/h200).
COMPILER_OPTIONS: dict[str, Any] = {"combo_kernels": True}
COMPILED_VARIANTS = 1024  # of one function that a process may hold: models, modes, sizes of batches


@dataclass(frozen=True)
class Runtime:
    """How to carry out a run; may differ when it is resumed."""

    device: str = "auto"
    """auto, cpu or cuda."""
    compile: Literal["auto", "yes", "no"] = "auto"
    """Use torch.compile (the first steps take a minute); auto: on a single GPU."""
    capture: bool = True
    """Run each step as one CUDA graph (on a single GPU that holds the images)."""
    tensorboard: bool = False
    """Also write TensorBoard files (needs the extra `tensorboard`)."""

    def resolve(self, job: Processes) -> "Runtime":
        """With `compile` decided for where the run is."""
        if self.compile != "auto":
            return self
        alone_on_gpu = job.device.type == "cuda" and job.world == 1
        yes = alone_on_gpu and importlib.util.find_spec("triton") is not None
        return replace(self, compile="yes" if yes else "no")


@dataclass
class Equipment:
    """What a run works with."""

    model: ImageClassifier
    batches: TrainBatches
    """This process's."""
    steps: int
    moment: Callable[[int], Moment]
    train_step: TrainStep
    captured: CapturedSteps | None
    uncaptured: Callable[[int], None]
    """Runs a step where none is captured."""
    held_out: dict[str, HeldOut | None]
    resolved: dict[str, Any]
    """What became of the choices that config and runtime leave open."""

    def release(self) -> None:
        """Let go of the graphs, which hold a pool of memory."""
        self.captured, self.held_out = None, {}


def assemble(
    config: Config,
    dataset: Dataset,
    runtime: Runtime,
    job: Processes,
    *,
    fresh: bool,
    tell: Callable[[str], None],
) -> Equipment:
    """All parts of a run, or the first reason why they do not fit.

    A `fresh` run has no checkpoint, and starts from the weights that its config names. `tell` is
    called with what a user should know.
    """
    runtime = runtime.resolve(job)
    check_evaluation(config, dataset)
    model = build_model(config, dataset).to(job.device)
    if config.model.pretrained is not None and fresh:
        tell(start_from_pretrained(model, config.model))
    make_batches = partial(train_batches, config, dataset, dataset.train.to(job.device))
    batches = make_batches(job)
    steps = config.steps or config.epochs * batches.steps_per_epoch
    moment = partial(moment_of, config, steps, batches.steps_per_epoch)
    compile_part = partial(compiled, runtime=runtime)
    wrapped = wrap(model, job, runtime, config)
    train_step = TrainStep(wrapped, model, config, job.world, compile_part)
    graphs, captured = None, None
    if (why_uncaptured := capture_note(batches.split, job, runtime)) is None:
        graphs, render = Graphs(job.device), compile_part(batches.render)
        captured = CapturedSteps(graphs, batches, render, train_step, moment, steps)
    everyones = partial(make_batches, Processes(0, 1, job.device))
    uncaptured = partial(run_step, train_step, batches, everyones, moment)
    measuring = train_step, config, job, graphs, compile_part
    held_out = {
        name: None if split is None else HeldOut(split, *measuring)
        for name, split in (("val", dataset.validation), ("test", dataset.test))
    }
    for note in (batch_size_note(config, batches), why_uncaptured, batch_norm_note(model, job)):
        if note:
            tell(note)
    resolved = {
        "image_size": list(model.image_size),
        "loss": loss_name(config.optim, model),
        "eval_every": config.eval_every or batches.steps_per_epoch,
        "device": job.device.type,
        "compile": runtime.compile == "yes",
        "capture": captured is not None,
        "processes": job.world,
    }
    return Equipment(
        model, batches, steps, moment, train_step, captured, uncaptured, held_out, resolved
    )


def moment_of(config: Config, steps: int, epoch_steps: int, step: int) -> Moment:
    """Where in a run of so many steps a step is, counted from 0."""
    lr = learning_rate(config.optim, step, steps, epoch_steps)
    return Moment(step, lr, step / epoch_steps)


def build_model(config: Config, dataset: Dataset) -> ImageClassifier:
    """The model for a dataset, its initial weights a function of the seed."""
    torch.manual_seed(config.seed)
    model = create_model(
        config.model.model,
        num_classes=len(dataset.class_names),
        image_size=dataset.image_size if config.data.crop is None else config.data.crop,
        in_channels=dataset.channels,
        multilabel=dataset.task == "multilabel",
        **config.model.options(),
    )
    model.class_names = list(dataset.class_names)
    model.resize = None if config.data.crop is None else dataset.image_size
    return model


def start_from_pretrained(model: ImageClassifier, config: ModelConfig) -> str:
    """Give the model the weights it shall start from; returns what to tell the user."""
    source = config.pretrained
    if source == "timm":
        backbone = getattr(model, "backbone", None)
        if config.backbone is None or not isinstance(backbone, TimmBackbone):
            raise ValueError("`pretrained` must come with `backbone` when it is timm, got none")
        trained = TimmBackbone(config.backbone, model.in_channels, pretrained=True)
        backbone.load_state_dict(trained.state_dict())
        return f"starting from timm's weights of {config.backbone}"
    assert source is not None
    checkpoint = _pretrained_checkpoint(source, model.iterations)
    if (described := read_metadata(checkpoint)["model"]) != model.name:
        raise ValueError(
            f"`pretrained` must hold weights of {model.name}, got {source} with {described}"
        )
    new = load_backbone(model, checkpoint)
    what = "of" if Path(source).expanduser().exists() else "that ship for"
    fresh = f"; new: {', '.join(new)}" if new else ""
    return f"starting from the weights {what} {source}{fresh}"


def model_to_start_from(source: str, iterations: int | None) -> str:
    """Name of the model whose weights `pretrained` stands for, or a one-line ValueError."""
    return read_metadata(_pretrained_checkpoint(source, iterations))["model"]


def _pretrained_checkpoint(source: str, iterations: int | None) -> Path:
    return find_checkpoint(source, iterations, expected=f"{KINDS}, or timm with a backbone")


def load_data(config: Config, reporter: Reporter) -> Dataset:
    data = config.data
    dataset = load_dataset(
        data.data,
        root=data.data_root,
        image_size=data.image_size,
        strict=data.strict,
        validation=data.validation,
        seed=config.seed,
    )
    for line in dataset.skipped_lines():
        reporter.message(line)
    return dataset


def train_batches(config: Config, dataset: Dataset, split: Split, job: Processes) -> TrainBatches:
    """Of `split`, which is the dataset's training images where the job wants them."""
    data = config.data
    if data.cutmix and dataset.task == "multilabel":
        raise ValueError(f"`cutmix` must be 0 where images have several classes, got {data.cutmix}")
    augment = Augment(data.padding, data.flip, data.cutout, data.crop)
    batches = TrainBatches(
        split,
        config.batch_size,
        seed=config.seed,
        rank=job.rank,
        world=job.world,
        augment=augment if augment != Augment(0, False) else None,
        cutmix=data.cutmix,
        classes=len(dataset.class_names),
    )
    batches.render(batches.plan(0)[:1].to(split.device if split.resident else "cpu"))  # or raise
    return batches


def check_evaluation(config: Config, dataset: Dataset) -> None:
    """Raise now what would be raised after the first hours of training."""
    for split in (dataset.validation, dataset.test):
        if split is not None:
            next(iter(EvalBatches(split, 1, crop=config.data.crop)))


def wrap(model: ImageClassifier, job: Processes, runtime: Runtime, config: Config) -> nn.Module:
    """The model as training calls it: synchronised, distributed, compiled, as asked for."""
    if job.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(job.device)  # of runs before in this process
        _prepare_convolutions(model)
    wrapped: nn.Module = model
    if job.world > 1:
        if config.sync_bn and job.device.type == "cuda":
            wrapped = nn.SyncBatchNorm.convert_sync_batchnorm(wrapped)
        devices = [job.device] if job.device.type == "cuda" else None
        wrapped = DistributedDataParallel(wrapped, device_ids=devices)
    return compiled(wrapped, runtime)


def _prepare_convolutions(model: nn.Module) -> None:
    """Channels last, as tensor cores read them; transforms of capsules stay as they are."""
    torch.backends.cudnn.benchmark = True  # few shapes, many steps: it pays to time algorithms
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            weight = module.weight.data
            module.weight.data = weight.contiguous(memory_format=torch.channels_last)


def compiled(function: Callable, runtime: Runtime) -> Any:
    """As `torch.compile` makes it, if asked for; each shape is compiled by itself."""
    if runtime.compile != "yes":
        return function
    import torch._dynamo.config as limits  # late: it takes seconds

    # runs of one process share what fits several of them, and do not count against each other
    limits.recompile_limit = limits.accumulated_recompile_limit = COMPILED_VARIANTS
    return torch.compile(function, dynamic=False, options=COMPILER_OPTIONS)


def batch_size_note(config: Config, batches: TrainBatches) -> str | None:
    """What a user should know whose batches hold all images."""
    images = len(batches.split)
    if config.batch_size <= images:
        return None
    return (
        f"`batch_size` (={config.batch_size:,}) is more than the {images:,} training "
        "images: every step takes all of them"
    )


def capture_note(split: Split, job: Processes, runtime: Runtime) -> str | None:
    """None where steps are captured as CUDA graphs; else what a user should know, if anything."""
    if job.device.type != "cuda" or not runtime.capture:
        return ""
    if job.world > 1:
        return "with several processes a step is not captured as a CUDA graph"
    if not split.resident:
        return "images stream from host memory, so a step is not captured as a CUDA graph"
    return None


def batch_norm_note(model: nn.Module, job: Processes) -> str | None:
    """What a user of several CPU processes should know, where it matters."""
    norms = any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    if norms and job.world > 1 and job.device.type == "cpu":
        return "BatchNorm statistics are per process on a CPU"
    return None
