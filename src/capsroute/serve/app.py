"""The application: the page's files, the API, and what is answered when something is wrong."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

import capsroute
from capsroute.inference import Predictor
from capsroute.serve import schemas, uploads
from capsroute.serve.batching import BusyError
from capsroute.serve.guard import HEADERS, Guard
from capsroute.serve.limits import Limits
from capsroute.serve.service import Service
from capsroute.serve.uploads import RefusedError

PAGE = Path(__file__).parent / "page"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
RETRY_AFTER = 1  # seconds
ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))

IMAGE_BODY = {
    "requestBody": {
        "required": True,
        "description": "The image, as a file named `image` in a form or as the body itself.",
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["image"],
                    "properties": {"image": {"type": "string", "format": "binary"}},
                }
            },
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        },
    }
}


def _problem_schema(description: str) -> dict[str, Any]:
    return {"model": schemas.ErrorAnswer, "description": description}


WRONG_HOST: dict[int | str, dict[str, Any]] = {
    403: _problem_schema("The Host header names another server.")
}
PROBLEMS: dict[int | str, dict[str, Any]] = {
    403: _problem_schema("A page of another site, or a Host header that names another server."),
    408: _problem_schema("The upload took too long."),
    413: _problem_schema("Too many bytes or too many pixels."),
    415: _problem_schema(f"Not an image of a format that is read: {', '.join(uploads.FORMATS)}."),
    422: _problem_schema("A damaged image, or a parameter out of its range."),
    503: {
        **_problem_schema("Busy; try again after the seconds in `Retry-After`."),
        "headers": {
            "Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}
        },
    },
}


def create_app(
    predictor: Predictor, limits: Limits | None = None, *, allowed_hosts: Iterable[str] = ()
) -> FastAPI:
    """Create the application for one model and warm it up.

    Host names other than localhost must be in `allowed_hosts`.
    """
    service = Service(predictor, limits or Limits())
    service.warm_up()
    app = FastAPI(
        title="capsroute",
        summary=f"What {predictor.title} sees in an image, and what routed where.",
        version=capsroute.__version__,
        docs_url=None,  # FastAPI's page loads scripts from elsewhere; `/docs` is our own
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,  # what clients' methods are called
        lifespan=service.running,
    )
    app.add_middleware(Guard, allowed_names=tuple(allowed_hosts))
    _add_api(app, service)
    _add_page(app)
    _answer_head(app)
    _add_errors(app)
    return app


def _add_api(app: FastAPI, service: Service) -> None:
    classes = len(service.predictor.class_names)
    top_k_type = Annotated[
        int, Query(ge=1, le=classes, description="How many classes `ranked` holds.")
    ]
    default = min(5, classes)

    # a Response skips FastAPI's second look at answers that are built to their schema
    @app.post(
        "/predict",
        summary="What an image shows",
        response_model=schemas.PredictionAnswer,
        response_description="The answer.",
        responses=PROBLEMS,
        openapi_extra=IMAGE_BODY,
        tags=["model"],
    )
    async def predict(request: Request, top_k: top_k_type = default) -> Response:
        return _json(await service.predict(request, top_k))

    @app.post(
        "/explain",
        summary="What an image shows, and what routed where",
        response_model=schemas.ExplanationAnswer,
        response_description="The answer and its explanation.",
        responses={404: _problem_schema("The model cannot be explained."), **PROBLEMS},
        openapi_extra=IMAGE_BODY,
        tags=["model"],
    )
    async def explain(request: Request, top_k: top_k_type = default) -> Response:
        return _json(await service.explain(request, top_k))

    @app.get(
        "/model",
        summary="What the model is, and what uploads may be",
        response_description="The model.",
        responses=WRONG_HOST,
        tags=["server"],
    )
    async def model() -> schemas.ModelAnswer:
        return service.describe()

    @app.get(
        "/health",
        summary="Whether the server answers",
        response_description="It does.",
        responses=WRONG_HOST,
        tags=["server"],
    )
    async def health() -> schemas.HealthAnswer:
        return schemas.HealthAnswer(
            status="ok",
            predictions_in_progress=service.predictions.in_progress,
            explanations_in_progress=service.explanations.in_progress,
        )


def _json(content: dict[str, Any]) -> Response:
    return Response(ENCODER.encode(content), media_type="application/json")


def _add_page(app: FastAPI) -> None:
    """The page's files, read once."""
    addresses = {"index.html": "/", "docs.html": "/docs"}
    for path in sorted(PAGE.iterdir()):
        answer = _file(path.read_bytes(), MEDIA_TYPES[path.suffix])
        address = addresses.get(path.name, f"/page/{path.name}")
        app.get(address, include_in_schema=False)(answer)


def _answer_head(app: FastAPI) -> None:
    """HEAD wherever GET is, which FastAPI leaves out; the server drops the body."""
    app.openapi()  # kept from here on: it would tell of every GET twice
    for route in app.routes:
        if isinstance(route, APIRoute) and route.methods and "GET" in route.methods:
            route.methods.add("HEAD")


def _file(content: bytes, media_type: str) -> Callable[[], Any]:
    async def answer() -> Response:
        return Response(content, media_type=media_type)

    return answer


def _add_errors(app: FastAPI) -> None:
    """Every problem is one line of JSON; what went wrong inside stays on the server's log."""

    @app.exception_handler(RefusedError)
    async def refused(_: Request, error: RefusedError) -> Response:
        return _problem(error.status, error.message)

    @app.exception_handler(BusyError)
    async def busy(_: Request, __: BusyError) -> Response:
        retry = {"retry-after": str(RETRY_AFTER)}
        return _problem(503, "the server is busy; try again in a moment", retry)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        name = first["loc"][-1]
        return _problem(422, f"`{name}`: {first['msg']}, got {first.get('input')!r:.60}")

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        message = {
            404: "there is nothing here; see /docs",
            405: f"{request.method} is not taken here; see /docs",
        }.get(error.status_code, str(error.detail))
        return _problem(error.status_code, message, error.headers)

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> Response:
        return _problem(400, "the client went away")  # nobody reads this

    @app.exception_handler(Exception)
    async def unexpected(_: Request, __: Exception) -> Response:
        # Starlette answers this one outside of all middleware, the guard included
        return _problem(500, "something went wrong in the server; its log says what", HEADERS)


def _problem(status: int, message: str, headers: Any = None) -> Response:
    return JSONResponse({"error": message}, status_code=status, headers=headers)
