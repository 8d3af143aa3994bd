"""The shapes of the API's answers."""

from typing import Literal

from pydantic import BaseModel, Field


class RankedClass(BaseModel):
    label: str
    probability: float = Field(ge=0, le=1)


class PredictionAnswer(BaseModel):
    labels: list[str] = Field(
        description="The answer: one class; for a multi-label model the set, which may be empty."
    )
    ranked: list[RankedClass] = Field(description="The `top_k` classes, most likely first.")
    remark: str | None = Field(description="What to know of the image, such as a light background.")


class ExplainedClass(BaseModel):
    index: int
    name: str
    probability: float = Field(ge=0, le=1)
    colour: str = Field(description="Of its heat map, `#rrggbb`.")
    heat: str = Field(
        description="PNG as a data URI, as large as the model's input: opacity is the heat."
    )
    rival: str | None = Field(
        description="The class that the heat holds this one against; null where it is of one alone."
    )
    carried: float = Field(description="Part of all that spoke for it in the links to it.")
    caption: str = Field(description="The same in words.")


class Capsule(BaseModel):
    layer: int = Field(description="0 holds the primary capsules.")
    row: int
    column: int
    capsule: int
    box: tuple[int, int, int, int] = Field(
        description="Pixels that it sees: top, left, bottom, right; the last two excluded."
    )
    shown: tuple[int, int, int, int] = Field(
        description="Pixels to show for it: its box, or what lies around its place."
    )


class Link(BaseModel):
    class_index: int
    child: Capsule
    parent: Capsule
    share: float = Field(description="The child's part of all that spoke for the parent.")
    coefficient: float = Field(description="How much of the child was routed to the parent.")


class RoutedLayer(BaseModel):
    name: str
    layer: int
    parents: int = Field(description="Capsules that compete for a child.")
    children: int = Field(description="Capsules that a parent gathers votes from.")
    entropy: list[float] = Field(
        description="Of a child's coefficients, by iteration: 1 is even, 0 all to one parent."
    )
    used: int = Field(description="The last iteration that reaches the scores, counted from 1.")
    deviation: float = Field(
        description="How far any share that counts is from even, in units of an even share."
    )
    never_win: float | None = Field(
        description="Share of its capsules that are no child's first choice."
    )
    nobody: float = Field(description="What the children gave to no parent, on average.")
    routed: bool = Field(description="Whether the coefficients that count are not nearly even.")
    state: str = Field(description="The same in words.")


class Explanation(BaseModel):
    """`Explanation.as_dict` of `capsroute.explain`."""

    model: str
    iterations: int | None
    map: str = Field(description="Which definition of heat.")
    predicted: list[str]
    classes: list[ExplainedClass] = Field(description="Those predicted, or the likeliest.")
    patches: str = Field(description="What `shown` shows of each capsule.")
    links: list[Link] = Field(description="The strongest of each class, parents first.")
    layers: list[RoutedLayer]
    notes: list[str] = Field(description="What to know before believing the pictures.")


class ExplanationAnswer(BaseModel):
    prediction: PredictionAnswer
    image: str = Field(description="What the model saw: a PNG as a data URI.")
    explanation: Explanation


class LimitsAnswer(BaseModel):
    upload_bytes: int
    pixels: int
    formats: list[str]


class ModelAnswer(BaseModel):
    name: str = Field(description="Of the architecture.")
    source: str | None = Field(
        description="The run's folder, the file or the pretrained name that is served, without "
        "the path to it; null for a model in memory."
    )
    title: str = Field(description="Both in one, to show.")
    class_names: list[str]
    image_size: tuple[int, int] = Field(description="Height and width.")
    in_channels: int
    multilabel: bool = Field(description="Any number of classes an image, not exactly one.")
    iterations: int | None = Field(description="Routing iterations; null: it does not route.")
    parameters: int | None = Field(description="null for an exported file.")
    explainable: bool
    unexplained: str | None = Field(description="Why it is not explainable; null if it is.")
    digits: bool = Field(description="Reads light digits on a dark ground: can be drawn for.")
    limits: LimitsAnswer
    capsroute: str = Field(description="Version.")


class HealthAnswer(BaseModel):
    status: Literal["ok"]
    predictions_in_progress: int
    explanations_in_progress: int


class ErrorAnswer(BaseModel):
    error: str = Field(description="One line.")
