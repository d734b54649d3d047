"""What a change of a config field affects. Each field's type states it, such as `affects.Training[int]`."""

import enum
from typing import Annotated, TypeVar


class Effect(enum.Enum):
    """What a change of a field affects in a run. A field with several effects states the first in this list."""

    SHAPES = "the shapes of the weights"
    FUNCTION = "what given weights compute"
    START = "the weights with which a run begins"
    TRAINING = "the course of training, and so its result"
    EVALUATION = "what suites measure, and generated text"
    ROUNDING = "the rounding of results"
    NOTHING = "files, messages and time, but no result"


_T = TypeVar("_T")
Shapes = Annotated[_T, Effect.SHAPES]
Function = Annotated[_T, Effect.FUNCTION]
Start = Annotated[_T, Effect.START]
Training = Annotated[_T, Effect.TRAINING]
Evaluation = Annotated[_T, Effect.EVALUATION]
Rounding = Annotated[_T, Effect.ROUNDING]
Nothing = Annotated[_T, Effect.NOTHING]
