"""What differs between two configs, and what of that changes a run's results."""

import dataclasses

from difftx.config import Config
from difftx.config.build import config_from_dict
from difftx.config.fields import values_of

# The numbers of a run do not depend on these beyond rounding.
NEUTRAL_GROUPS = ("mesh", "multihost", "checkpoint", "eval", "logging")
NEUTRAL_FIELDS = (
    "model.remat",
    "model.attention_implementation",
    "train.accumulation",
    "data.prefetch_batches",
    "data.verify",
    "data.cache_path",
)
# They do on these, but a run that is under way may go on with another value.
CONTINUABLE_GROUPS = ("guards",)
CONTINUABLE_FIELDS = ("train.steps", "checkpoint.init_from")


# Yet a reader must keep this one: it divides the rows of the batch that the checkpoint was trained with.
KEPT_FIELDS = ("train.accumulation",)


@dataclasses.dataclass(frozen=True)
class Change:
    """A field that differs."""

    field: str  # "group.name"
    old: object
    new: object

    def __str__(self) -> str:
        return f"{self.field}: {self.old} → {self.new}"

    @property
    def is_neutral(self) -> bool:
        """Whether a run with the one value is as good as a run with the other."""
        group = self.field.partition(".")[0]
        return self.field not in CONTINUABLE_FIELDS and (group in NEUTRAL_GROUPS or self.field in NEUTRAL_FIELDS)

    @property
    def is_safe(self) -> bool:
        """Whether a run may go on with the new value."""
        group = self.field.partition(".")[0]
        return self.is_neutral or group in CONTINUABLE_GROUPS or self.field in CONTINUABLE_FIELDS


def changed_fields(old: Config, new: Config) -> list[Change]:
    """Return each field that differs."""
    before, after = values_of(old), values_of(new)
    return [
        Change(f"{group}.{name}", before[group][name], value)
        for group, fields in after.items()
        for name, value in fields.items()
        if before[group][name] != value
    ]


def config_for_reader(trained: Config, now: Config) -> Config:
    """Return the config by which a checkpoint is read: `trained`, with the neutral fields of `now`.

    Args:
        trained: of the checkpoint; it decides model and data.
        now: of the run directory, with the reader's overrides; it decides mesh, evaluation and the like.
    """
    raw = values_of(trained)
    for change in changed_fields(trained, now):
        if change.is_neutral and change.field not in KEPT_FIELDS:
            group, name = change.field.split(".")
            raw[group][name] = change.new
    return config_from_dict(raw)
