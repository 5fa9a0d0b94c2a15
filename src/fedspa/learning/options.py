"""The options of each task, [task.options] in a config. It needs no torch: configs and reports read this."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

Error = Literal["mse", "mae", "huber"]
BALANCED = "balanced"


def _or_balanced(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    if isinstance(value, str) and value != BALANCED:
        raise ValueError("it must be 'balanced', or a list of numbers")
    return value if value == BALANCED else handler(value)


Weights = Annotated[
    list[Annotated[float, Field(ge=0, le=1e6)]],
    Field(min_length=1, max_length=10_000),
    WrapValidator(_or_balanced),
    PlainSerializer(lambda weights: weights),  # a list or a word: pydantic's own would warn of the word
]


class TaskOptions(BaseModel):
    """A task without options."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Labels(TaskOptions):
    weights: Weights | None = Field(
        None,
        description="Public weights of the ones of each label against its zeros, as in `[1.0, 9.0]`; or `balanced`, "
        "by the server's held-out records.",
    )


class _Classes(TaskOptions):
    weights: Weights | None = Field(
        None,
        description="Public weights of the classes, as in `[1.0, 9.0]`; or `balanced`, by the server's held-out "
        "records.",
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="This share of a label goes to all classes."
    )


class _Numbers(TaskOptions):
    loss: Error = Field("mse", description="Squared, absolute or Huber's error.")
    huber: Annotated[float, Field(ge=1e-10, le=1e10)] = Field(
        1.0, description="For the loss `huber`: squared up to this error, and absolute beyond."
    )

    @model_validator(mode="after")
    def _of_huber(self) -> _Numbers:
        if self.huber != 1 and self.loss != "huber":
            raise ValueError(f"task.options.huber is {self.huber:g}, which is for loss = 'huber'; it is {self.loss!r}")
        return self


class _Tokens(TaskOptions):
    ignore_index: Annotated[int, Field(ge=-(2**31), lt=2**31)] = Field(
        -100, description="The label of tokens that do not count."
    )


class StatisticsOptions(TaskOptions):
    columns: Annotated[list[str], Field(min_length=1, max_length=10_000)] | None = Field(
        None, description="The columns of the schema; all of them if unset."
    )
    bins: Annotated[int, Field(ge=2, le=10_000)] = Field(
        20, description="Parts of equal width in a number's public range, for its histogram and quantiles."
    )
    by_class: bool = Field(False, description="Whether each statistic is taken for each class of the target by itself.")
    shares: dict[str, Annotated[float, Field(ge=1e-3, le=1e3)]] = Field(
        {}, description="Weights of columns: one of 4 halves its error, at the cost of all others; 1 if unset."
    )
    layout: Annotated[str, Field(max_length=300_000)] | None = Field(
        None, description="What a server announces in place of the other options; leave it unset."
    )

    @model_validator(mode="after")
    def _announced_alone(self) -> StatisticsOptions:
        if self.layout is not None and self.model_fields_set != {"layout"}:
            raise ValueError("task.options.layout stands alone: a server writes it in place of the other options")
        return self


OPTIONS: dict[str, type[TaskOptions]] = {
    "classification": _Classes,
    "binary": _Labels,
    "multi-label": _Labels,
    "regression": _Numbers,
    "next-token": _Tokens,
    "token-classification": _Tokens,
    "statistics": StatisticsOptions,
}
