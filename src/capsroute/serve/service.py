"""From a request to an answer: upload, model, batch by batch."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from PIL import Image
from starlette.requests import Request
from torch import Tensor

import capsroute
from capsroute.data.datasets import DIGITS
from capsroute.explain import explain
from capsroute.explain.explanation import picture, png_uri
from capsroute.explain.trace import why_unexplained
from capsroute.inference import Prediction, Predictor
from capsroute.models.base import count_parameters
from capsroute.serve import schemas, uploads
from capsroute.serve.batching import Batcher, BusyError
from capsroute.serve.limits import Limits
from capsroute.serve.uploads import RefusedError

DECODING_THREADS = 2  # each holds one picture's pixels
# pictures with no more than both are decoded with their batch, one after the other: twice as fast
SMALL_PIXELS = 128 * 128
SMALL_BYTES = 4 * 2**10  # too few for a header that takes long to open
WARM_UP_SECONDS = 1.0

T = TypeVar("T")
Picture = Image.Image | Tensor
"""An upload whose header was let through, or the model's input made of it."""


class Explained(NamedTuple):
    """What is told of one image that is to be explained."""

    prediction: Prediction
    image: str
    explanation: dict[str, Any]

    def as_dict(self, top_k: int) -> dict[str, Any]:
        """As `schemas.ExplanationAnswer`."""
        return {
            "prediction": self.prediction.as_dict(top_k),
            "image": self.image,
            "explanation": self.explanation,
        }


class Service:
    """One model, its batchers, and the way from a request to an answer."""

    def __init__(self, predictor: Predictor, limits: Limits) -> None:
        self.predictor = predictor
        self.limits = limits
        self.unexplained = why_unexplained(predictor.model)
        self.predictions: Batcher[Picture, Prediction] = Batcher(
            self._predict,
            max_batch=limits.max_batch,
            max_wait=limits.max_wait,
            places=limits.predictions,
        )
        self.explanations: Batcher[Picture, Explained] = Batcher(
            self._explain, max_batch=1, max_wait=0, places=limits.explanations
        )
        self._decoders = ThreadPoolExecutor(DECODING_THREADS, "capsroute-decode")

    @asynccontextmanager
    async def running(self, _: object) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await self.predictions.close()
            await self.explanations.close()
            self._decoders.shutdown()

    def warm_up(self) -> None:
        """Kernels are made for each size of batch, which takes time and memory once.

        As many sizes as a moment allows; a model that takes no pictures is found out here.
        """
        height, width = self.predictor.image_size
        image = self.predictor.prepare(Image.new("RGB", (width, height)))
        if self.unexplained is None:
            self._explain([image])
        until = time.monotonic() + WARM_UP_SECONDS
        for size in range(1, self.limits.max_batch + 1):
            self._predict([image] * size)
            if time.monotonic() > until:
                return

    def _predict(self, pictures: Sequence[Picture]) -> list[Prediction | Exception]:
        """Each picture's answer, or why it was refused.

        Every class is ranked; each request takes its `top_k` of them.
        """
        prepared = [self._prepare(picture) for picture in pictures]
        images = [image for image in prepared if isinstance(image, Tensor)]
        answers = iter(self.predictor.answer(images, top_k=len(self.predictor.class_names)))
        return [next(answers) if isinstance(image, Tensor) else image for image in prepared]

    def _prepare(self, picture: Picture) -> Tensor | RefusedError:
        if isinstance(picture, Tensor):
            return picture
        try:
            return uploads.decode(picture, self.predictor.prepare)
        except RefusedError as refused:
            return refused

    def _explain(self, pictures: Sequence[Picture]) -> list[Explained | Exception]:
        prepared = [self._prepare(picture) for picture in pictures]
        return [
            self._explain_one(image) if isinstance(image, Tensor) else image for image in prepared
        ]

    def _explain_one(self, image: Tensor) -> Explained:
        model = self.predictor.model
        assert model is not None  # an exported file is not explainable
        explanation = explain(model, image)
        probabilities = torch.tensor([explanation.probabilities])
        prediction = self.predictor.decide(probabilities, top_k=len(self.predictor.class_names))[0]
        return Explained(
            replace(prediction, remark=self.predictor.remark(image)),
            png_uri(picture(image)),
            explanation.as_dict(),
        )

    async def predict(self, request: Request, top_k: int) -> dict[str, Any]:
        with self.predictions.place() as submit:
            picture = await self._picture(request)
            answer = await self._in_time(submit(picture))
        return answer.as_dict(top_k)

    async def explain(self, request: Request, top_k: int) -> dict[str, Any]:
        if self.unexplained is not None:
            raise RefusedError(
                404, f"{self.predictor.title} cannot be explained: {self.unexplained}"
            )
        with self.explanations.place() as submit:
            picture = await self._picture(request)
            explained = await self._in_time(submit(picture))
        return explained.as_dict(top_k)

    async def _in_time(self, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self.limits.seconds):
                return await work
        except TimeoutError:
            raise BusyError from None

    async def _picture(self, request: Request) -> Picture:
        """The upload; one that is not small is opened and decoded apart, to hold nobody up.

        Opening alone can be made to take seconds, by thousands of tiny entries in a header.
        """
        try:
            async with asyncio.timeout(self.limits.seconds):
                data = await uploads.read_upload(request, self.limits.upload)
        except TimeoutError:
            raise RefusedError(408, "the upload took too long") from None
        if len(data) <= SMALL_BYTES:
            upload = uploads.open_picture(data, self.limits.pixels)
            if upload.width * upload.height <= SMALL_PIXELS:
                return upload
        loop = asyncio.get_running_loop()
        return await self._in_time(loop.run_in_executor(self._decoders, self._read, data))

    def _read(self, data: bytes) -> Tensor:
        upload = uploads.open_picture(data, self.limits.pixels)
        return uploads.decode(upload, self.predictor.prepare)

    def describe(self) -> schemas.ModelAnswer:
        predictor, model = self.predictor, self.predictor.model
        return schemas.ModelAnswer(
            name=predictor.name,
            source=predictor.source,
            title=predictor.title,
            class_names=predictor.class_names,
            image_size=predictor.image_size,
            in_channels=predictor.in_channels,
            multilabel=predictor.multilabel,
            iterations=predictor.iterations,
            parameters=None if model is None else count_parameters(model),
            explainable=self.unexplained is None,
            unexplained=self.unexplained,
            digits=predictor.in_channels == 1 and predictor.class_names == list(DIGITS),
            limits=schemas.LimitsAnswer(
                upload_bytes=self.limits.upload,
                pixels=self.limits.pixels,
                formats=list(uploads.FORMATS),
            ),
            capsroute=capsroute.__version__,
        )
