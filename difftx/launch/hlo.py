"""Communication of a compiled program, parsed from the text of its optimised HLO.

XLA's statistics count a loop's body once. Here the collectives of a `while` body are multiplied by its trip count.
Calls, fusions and asynchronous pairs are followed. A conditional counts as the branch that sends most.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Sequence

import numpy as np

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", "collective-broadcast")
# Bits per element. Types that are not listed have the width in their names: bf16, s4, f8e4m3fn.
BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128}  # nosec B105: "token" is an XLA type.

_HEADER = re.compile(r"(?:ENTRY )?%?([\w.$-]+) (?:\(.*\) -> .*)?\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.$-]+) = (.*)")
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,<=]*)\]")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.$-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_LOOP = ("condition", "body")
_REDUCE_SCATTER = re.compile(r"all-reduce-scatter")  # libtpu's fusion of an all-reduce and the slice that follows it.
_MEGASCALE = re.compile(r'_xla_megascale_target="\{([\d,:]+)\}.*_xla_megascale_transfer_type="(\w+)"')
_PARTITIONS = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction, and how often a step runs it."""

    kind: str  # One of KINDS.
    operand_bytes: float  # Size of the operands on one device.
    group: int  # Number of devices that communicate with each other.
    between_slices: bool  # Whether these devices belong to different slices of a multi-slice TPU pod.
    runs: int  # Executions per step.
    shape: str  # HLO type of the result.
    source: str  # Name of the operation in the traced program (`op_name`).

    @property
    def sent_bytes(self) -> float:
        """Bytes that one device sends over all runs, with bandwidth-optimal (ring) algorithms."""
        others = self.group - 1
        if self.kind == "all-gather":
            return self.runs * self.operand_bytes * others
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.runs * self.operand_bytes
        return self.runs * self.operand_bytes * others / self.group * (2 if self.kind == "all-reduce" else 1)


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    type: str
    opcode: str
    operands: str
    attributes: str


def list_collectives(text: str) -> list[Collective]:
    """Return the collectives of a compiled program, whose text is `compiled.as_text()`."""
    return _Program(text).collectives()


class _Program:
    def __init__(self, text: str):
        header, _, body = text.partition("\n")
        self._devices = math.prod(map(int, _PARTITIONS.findall(header)))
        self._computations, self._entry = _split(body)
        self._collectives_of = functools.cache(self._list)

    def collectives(self) -> list[Collective]:
        return list(self._collectives_of(self._entry))

    def _list(self, computation: str) -> tuple[Collective, ...]:
        types = {i.name: i.type for i in self._computations[computation]}
        found: list[Collective] = []
        if not self._continues(computation):
            for instruction in self._computations[computation]:
                found += self._of_instruction(instruction, types)
        return tuple(found)

    def _continues(self, computation: str) -> bool:
        """Return whether this is a fusion that continues or ends a collective which another fusion started."""
        attributes = [i.attributes for i in self._computations[computation] if i.opcode == "custom-call"]
        if any('"AsyncCollectiveStart"' in a for a in attributes):
            return False
        return "async_collective_fusion" in computation or any('"AsyncCollectiveDone"' in a for a in attributes)

    def _of_instruction(self, instruction: _Instruction, types: dict[str, str]) -> Iterator[Collective]:
        kind = instruction.opcode.removesuffix("-start")
        if kind in KINDS:
            yield self._collective(kind, instruction, types, self._groups(instruction).shape[1])
        elif instruction.opcode == "send" and (between := _MEGASCALE.search(instruction.attributes)):
            # libtpu compiles the program of one slice. Transfers to other slices are `send` instructions to the host,
            # whose attributes name the kind of the collective and the slices.
            kind, group = between[2].lower().replace("_", "-"), _count(between[1])
            yield self._collective(kind, instruction, types, group, between_slices=True)
        elif instruction.opcode.endswith(("-done", "-update")):
            return  # The corresponding -start instruction is counted.
        elif branches := _BRANCHES.search(instruction.attributes):
            names = [name.strip().removeprefix("%") for name in branches[1].split(",")]
            yield from max(map(self._collectives_of, names), key=lambda cs: sum(c.operand_bytes * c.runs for c in cs))
        else:
            runs = self._trips(instruction) if instruction.opcode == "while" else 1
            for name in _CALLED.findall(instruction.attributes):
                inner = self._collectives_of(name)
                if _REDUCE_SCATTER.match(name):
                    inner = [dataclasses.replace(c, kind="reduce-scatter") for c in inner]
                yield from (dataclasses.replace(c, runs=c.runs * runs) for c in inner)

    def _trips(self, loop: _Instruction) -> int:
        """Return a loop's number of iterations: XLA's known trip count, or else derived from the loop's counter.

        libtpu removes the known trip count. Its counters start at 0, grow by a constant and are compared with another
        constant. A loop with a data-dependent end counts as one iteration.
        """
        if noted := _TRIPS.search(loop.attributes):
            return int(noted[1])
        condition, body = (self._by_name(re.search(rf"\b{part}=%?([\w.$-]+)", loop.attributes)) for part in _LOOP)
        compared = [condition[name] for name in _names([*condition.values()][-1].operands) if name in condition]
        bound = _constant(compared)
        index = [re.search(r"index=(\d+)", i.attributes) for i in compared if i.opcode == "get-tuple-element"]
        if bound is None or not index or index[0] is None:
            return 1
        counter = body[_names([*body.values()][-1].operands)[int(index[0][1])]]
        step = _constant([body[name] for name in _names(counter.operands) if name in body])
        return -(-bound // (step or 1))

    def _by_name(self, found: re.Match | None) -> dict[str, _Instruction]:
        assert found is not None
        return {i.name: i for i in self._computations[found[1]]}

    def _collective(
        self, kind: str, instruction: _Instruction, types: dict[str, str], group: int, *, between_slices: bool = False
    ) -> Collective:
        source = re.search(r'op_name="([^"]*)"', instruction.attributes)
        arrays = [types[name] for name in _names(instruction.operands)]
        return Collective(
            kind=kind,
            operand_bytes=sum(map(type_bytes, arrays)),
            group=group,
            between_slices=between_slices,
            runs=1,
            shape=instruction.type,
            source=source[1] if source else "",
        )

    def _groups(self, instruction: _Instruction) -> np.ndarray:
        """Return the ids of the devices that communicate with each other, `[groups, devices per group]`."""
        if pairs := re.search(r"source_target_pairs=\{(.*?\})\}", instruction.attributes):
            return np.array([_integers(pair) for pair in re.findall(r"\{([\d,]+)\}", pairs[1])])
        return replica_groups(instruction.attributes, self._devices)


def replica_groups(text: str, devices: int) -> np.ndarray:
    """Parse `replica_groups=…` in any of its three notations: lists, a transposed iota, or axes of a mesh.

    Returns:
        Device ids, `[groups, devices per group]`.
    """
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", text):
        return _iota(iota[3]).reshape(int(iota[1]), int(iota[2]))
    if listed := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", text):
        return np.array([_integers(group) for group in re.findall(r"\{([\d,]+)\}", listed[1])])
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}", text):
        return _mesh_groups(*mesh.groups())
    if "replica_groups={}" in text:
        return np.arange(devices)[None]
    raise ValueError(f"the groups of a collective are not understood: {text[:200]}")


def _mesh_groups(axes: str, device_ids: str | None, chosen: str) -> np.ndarray:
    """Parse groups over mesh axes, such as `mesh['a'=8,'b'=4] {'a':(2)4,'b'}`.

    `'b'` is the whole axis. `'a':(2)4` is a factor of 4 of axis a, with a factor of 2 before it.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'?([^',=]+)'?=(\d+)", axes)}
    parts = {
        name: (int(before), int(size)) if size else (1, sizes[name])
        for name, before, size in re.findall(r"'?([^',:{}]+)'?(?::\((\d+)\)(\d+))?(?:,|$)", chosen)
    }
    shape, members = [], []
    for name, size in sizes.items():
        before, inside = parts.get(name, (size, 1))
        members.append(len(shape) + 1)
        shape += [before, inside, size // (before * inside)]
    if device_ids is None:
        ids = np.arange(math.prod(shape))
    else:
        ids = _iota(device_ids) if device_ids.startswith("[") else np.array(_integers(device_ids))
    moved = np.moveaxis(ids.reshape(shape), members, range(-len(members), 0))
    return moved.reshape(-1, math.prod(shape[i] for i in members))


def _iota(text: str) -> np.ndarray:
    """Return the numbers of `[2,4]T(1,0)`: 0 … 7 in shape (2, 4), transposed by (1, 0) and flattened."""
    shape, _, order = text.partition("T")
    sizes = _integers(shape.strip("[]"))
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return (ids.transpose(_integers(order.strip("()"))) if order else ids).reshape(-1)


def _count(ranges: str) -> int:
    """Return how many numbers a list of inclusive ranges has, such as 4 for `1,3:5`."""
    bounds = [_integers(part.replace(":", ",")) for part in ranges.split(",")]
    return sum(b[-1] - b[0] + 1 for b in bounds)


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def type_bytes(text: str) -> float:
    """Return the size in bytes of an HLO type, such as `bf16[8,128]{1,0}` or a tuple of such types."""
    total = 0.0
    for dtype, shape in _ARRAY.findall(text):
        digits = re.search(r"\d+", dtype)
        bits = BITS[dtype] if dtype in BITS else int(digits[0]) if digits else 0
        total += bits / 8 * math.prod(int(n.lstrip("<=")) for n in shape.split(",") if n)
    return total


def _split(body: str) -> tuple[dict[str, list[_Instruction]], str]:
    """Return the instructions of each computation, and the name of the entry computation."""
    computations: dict[str, list[_Instruction]] = {}
    entry, current = "", []
    for line in body.splitlines():
        if not line.startswith((" ", "}")) and (header := _HEADER.match(line)):
            current = computations[header[1]] = []
            entry = header[1] if line.startswith("ENTRY") else entry
        elif match := _INSTRUCTION.match(line):
            current.append(_instruction(match[1], match[2]))
    return computations, entry


def _instruction(name: str, rest: str) -> _Instruction:
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opening = rest.index("(", end)
    closing = _closing(rest, opening)
    return _Instruction(name, rest[:end], rest[end:opening].strip(), rest[opening + 1 : closing], rest[closing + 1 :])


def _constant(instructions: Sequence[_Instruction]) -> int | None:
    """Return the value of the first integer constant among the instructions, or None."""
    return next((int(i.operands) for i in instructions if i.opcode == "constant" and i.operands.isdigit()), None)


def _names(operands: str) -> list[str]:
    return re.findall(r"%([\w.$-]+)", operands)


def _closing(text: str, opening: int) -> int:
    """Return the index of the parenthesis that closes the one at `opening`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, opening):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"an unclosed parenthesis in HLO: {text[opening : opening + 80]}")
