"""Differences between two configs, classified by their effect on a run's results."""

import dataclasses

from difftx.config import Config
from difftx.config.build import config_from_dict
from difftx.config.fields import values_of

# Changing these fields alters a run's numbers by rounding at most.
NEUTRAL_GROUPS = ("mesh", "multihost", "checkpoint", "eval", "logging")
NEUTRAL_FIELDS = (
    "model.remat",
    "model.attention_implementation",
    "train.accumulation",
    "data.prefetch_batches",
    "data.verify",
    "data.cache_path",
)
# Changing these fields alters a run's numbers, but a run may still resume with a new value.
CONTINUABLE_GROUPS = ("guards",)
CONTINUABLE_FIELDS = ("train.steps", "checkpoint.init_from")
# Neutral fields that a reader must take from the checkpoint: the accumulation divides the rows of the training batch.
KEPT_FIELDS = ("train.accumulation",)


@dataclasses.dataclass(frozen=True)
class Change:
    """A field whose value differs between two configs."""

    field: str  # "group.name"
    old: object
    new: object

    def __str__(self) -> str:
        return f"{self.field}: {self.old} → {self.new}"

    @property
    def is_neutral(self) -> bool:
        """True if both values give the same results up to rounding."""
        group = self.field.partition(".")[0]
        return self.field not in CONTINUABLE_FIELDS and (group in NEUTRAL_GROUPS or self.field in NEUTRAL_FIELDS)

    @property
    def is_safe(self) -> bool:
        """True if a run may resume with the new value."""
        group = self.field.partition(".")[0]
        return self.is_neutral or group in CONTINUABLE_GROUPS or self.field in CONTINUABLE_FIELDS


def changed_fields(old: Config, new: Config) -> list[Change]:
    """Return the fields whose values differ."""
    before, after = values_of(old), values_of(new)
    return [
        Change(f"{group}.{name}", before[group][name], value)
        for group, fields in after.items()
        for name, value in fields.items()
        if before[group][name] != value
    ]


def config_for_reader(trained: Config, now: Config) -> Config:
    """Return the config to read a checkpoint with: the checkpoint's config with the neutral fields of `now`.

    `now` is the config of the run directory with the reader's overrides.
    """
    raw = values_of(trained)
    for change in changed_fields(trained, now):
        if change.is_neutral and change.field not in KEPT_FIELDS:
            group, name = change.field.split(".")
            raw[group][name] = change.new
    return config_from_dict(raw)
