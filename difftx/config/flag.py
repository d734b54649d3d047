"""Flags of config fields. A field's type states them, as in `flag.Branch[affects.Training[int]]`."""

import enum
from typing import Annotated, TypeVar


class Flag(enum.Enum):
    """A fact about a field in addition to its `Effect`. A field may have several flags."""

    BRANCH = "may change when a run branches from a checkpoint"
    CONVERSION = "may be set when a Transformer is converted to another architecture"
    RESUME = "may change when a run resumes, although it changes the result"
    LOCATION = "locates or names content that is identified by its hash"
    PROCESS = "may differ between the processes of a run"
    BUCKET = "may be a path in a bucket"
    HEADER = "path of a large file whose first line identifies its content"
    PRESET = "set by mesh.preset"
    KERNEL = "determines the shapes of the attention kernel's operands"
    SEED = "differs between the runs of one arm"
    SPECIFIC = "used by the architectures that name it in `SelfAttention.fields`"
    DECODER = "not a field of an attention layer, but of the decoder around it or of its training"


_T = TypeVar("_T")
Branch = Annotated[_T, Flag.BRANCH]
Conversion = Annotated[_T, Flag.CONVERSION]
Resume = Annotated[_T, Flag.RESUME]
Location = Annotated[_T, Flag.LOCATION]
Process = Annotated[_T, Flag.PROCESS]
Bucket = Annotated[_T, Flag.BUCKET]
Header = Annotated[_T, Flag.HEADER]
Preset = Annotated[_T, Flag.PRESET]
Kernel = Annotated[_T, Flag.KERNEL]
Seed = Annotated[_T, Flag.SEED]
Specific = Annotated[_T, Flag.SPECIFIC]
Decoder = Annotated[_T, Flag.DECODER]
