"""Find the collectives (all-gather, all-reduce, …) of a compiled program in the text of its optimised HLO.

XLA inserts collectives during compilation, so the jaxpr does not contain them. XLA's own statistics count the body of a
loop only once. `compiled.as_text()` lists computations, one instruction per line:

    HloModule jit_step, num_partitions=8
    %body (p: (s32[], f32[16])) -> (s32[], f32[16]) {
      %g = f32[128]{0} all-gather(%x), replica_groups=[1,8]<=[8], dimensions={0}
    }
    ENTRY %main (…) -> … {
      %w = (s32[], f32[16]) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}
    }

The parser starts at the ENTRY computation and follows calls, fusions, asynchronous pairs and loops. Collectives in the
body of a loop count once per iteration. A conditional counts as the branch that sends the most bytes.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Sequence

import numpy as np

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", "collective-broadcast")

_HEADER = re.compile(r"(?:ENTRY )?%?([\w.$-]+) (?:\(.*\) -> .*)?\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.$-]+) = (.*)")
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,<=]*)\]")
_CALLED = re.compile(r"\b(?:calls|to_apply|body)=%?([\w.$-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations|true_computation|false_computation)=(\{[^}]*\}|%[\w.$-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_MEGASCALE = re.compile(r'_xla_megascale_target="\{([\d,:]+)\}.*_xla_megascale_transfer_type="(\w+)"')
_PARTITIONS = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective instruction and how often a step executes it."""

    kind: str  # One of KINDS.
    operand_bytes: float  # Size of the operands on one device.
    group: int  # Number of devices that communicate with each other.
    between_slices: bool = False  # Whether the devices of the group belong to different TPU slices.
    hosts: int = 1  # Number of GPU hosts to which the devices of the group belong.
    runs: int = 1  # Executions per step.

    @property
    def sent_bytes(self) -> float:
        """Bytes that one device sends per step, with bandwidth-optimal (ring) algorithms."""
        others = self.group - 1
        if self.kind == "all-gather":
            return self.runs * self.operand_bytes * others
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.runs * self.operand_bytes
        return self.runs * self.operand_bytes * others / self.group * (2 if self.kind == "all-reduce" else 1)

    @property
    def interconnect_bytes(self) -> float:
        """Bytes that one device sends within its slice or GPU host."""
        return 0.0 if self.between_slices or 1 < self.hosts == self.group else self.sent_bytes

    @property
    def network_bytes(self) -> float:
        """Bytes that one device sends to other slices or GPU hosts."""
        if self.between_slices:
            return self.sent_bytes
        if self.hosts == 1:
            return 0.0
        per_host = self.group / self.hosts
        if self.kind == "all-to-all":
            return self.sent_bytes * (self.group - per_host) / (self.group - 1)
        return self.sent_bytes / per_host  # The host's network adapters share this traffic.


@dataclasses.dataclass(frozen=True)
class _Instruction:
    """A line `%name = type opcode(operands)attributes` in a computation."""

    name: str
    type: str
    opcode: str
    operands: str
    attributes: str


def list_collectives(text: str, host_devices: int | None = None) -> list[Collective]:
    """Return all collectives in `text`, the result of `compiled.as_text()`.

    `host_devices` is the number of GPUs per host. None: all devices are on one host or are TPUs.
    """
    program = _Program(text, host_devices)
    return program.collectives_of(program.entry)


class _Program:
    def __init__(self, text: str, host_devices: int | None):
        header, _, body = text.partition("\n")
        self._devices = math.prod(map(int, _PARTITIONS.findall(header)))
        self._host_devices = host_devices or self._devices
        self._computations, self.entry = _parse_computations(body)
        self.collectives_of = functools.cache(self._collectives_of_computation)

    def _collectives_of_computation(self, computation: str) -> list[Collective]:
        instructions = self._computations[computation]
        # libtpu splits an asynchronous collective over several fusions and repeats the instruction in each of them.
        # Count only the fusion that starts the collective.
        attributes = " ".join(i.attributes for i in instructions if i.opcode == "custom-call")
        is_part = "async_collective_fusion" in computation or '"AsyncCollectiveDone"' in attributes
        if is_part and '"AsyncCollectiveStart"' not in attributes:
            return []
        types = {i.name: i.type for i in instructions}
        return [collective for i in instructions for collective in self._collectives_of_instruction(i, types)]

    def _collectives_of_instruction(self, instruction: _Instruction, types: dict[str, str]) -> Iterator[Collective]:
        kind = instruction.opcode.removesuffix("-start")
        if kind in KINDS:
            groups = replica_groups(instruction.attributes, self._devices)
            hosts = max(len(set(group)) for group in (groups // self._host_devices).tolist())
            yield Collective(kind, _operand_bytes(instruction, types), groups.shape[1], hosts=hosts)
        elif instruction.opcode == "send" and (between := _MEGASCALE.search(instruction.attributes)):
            # libtpu compiles the program of one slice. It sends data for other slices to the host, with `send`. The
            # attributes of `send` name the kind of collective and the slices.
            kind = between[2].lower().replace("_", "-")
            slices = [_integers(part.replace(":", ",")) for part in between[1].split(",")]  # 1,3:5 means 1, 3, 4 and 5.
            group = sum(part[-1] - part[0] + 1 for part in slices)
            yield Collective(kind, _operand_bytes(instruction, types), group, between_slices=True)
        elif instruction.opcode.endswith(("-done", "-update")):
            return  # Only the corresponding -start instruction counts.
        elif instruction.opcode == "conditional":
            branches = _names(" ".join(_BRANCHES.findall(instruction.attributes)))
            yield from max(map(self.collectives_of, branches), key=lambda found: sum(c.sent_bytes for c in found))
        else:
            runs = self._trip_count(instruction) if instruction.opcode == "while" else 1
            for name in _CALLED.findall(instruction.attributes):
                for collective in self.collectives_of(name):
                    # libtpu's fusion of an all-reduce with a slice of its result is a reduce-scatter.
                    kind = "reduce-scatter" if name.startswith("all-reduce-scatter") else collective.kind
                    yield dataclasses.replace(collective, kind=kind, runs=collective.runs * runs)

    def _trip_count(self, loop: _Instruction) -> int:
        """Return a loop's number of iterations, or 1 if the number depends on data."""
        if known := _TRIPS.search(loop.attributes):
            return int(known[1])
        # libtpu does not write the known trip count. Its loop counters start at 0, grow by a constant step, and are
        # compared with a constant bound.
        condition, body = self._instructions_of(loop, "condition"), self._instructions_of(loop, "body")
        # The last instruction of a computation is its result. In the condition, it is `compare(counter, bound)`. In the
        # body, it is the tuple of the loop's new values.
        compared = [condition[name] for name in _names([*condition.values()][-1].operands) if name in condition]
        bound = _constant(compared)
        index = [re.search(r"index=(\d+)", i.attributes) for i in compared if i.opcode == "get-tuple-element"]
        if bound is None or not index or index[0] is None:
            return 1
        counter = body[_names([*body.values()][-1].operands)[int(index[0][1])]]  # add(old counter, step)
        step = _constant([body[name] for name in _names(counter.operands) if name in body])
        return -(-bound // (step or 1))

    def _instructions_of(self, loop: _Instruction, part: str) -> dict[str, _Instruction]:
        found = re.search(rf"\b{part}=%?([\w.$-]+)", loop.attributes)
        assert found is not None
        return {i.name: i for i in self._computations[found[1]]}


def _operand_bytes(instruction: _Instruction, types: dict[str, str]) -> float:
    return sum(type_bytes(types[name]) for name in _names(instruction.operands))


def replica_groups(text: str, devices: int) -> np.ndarray:
    """Parse a collective's attributes and return the device ids, `[groups, devices per group]`.

    The ids are in `source_target_pairs`, or in `replica_groups` in one of three notations: lists `{{0,2},{1,3}}`, a
    transposed iota `[2,2]<=[2,2]T(1,0)`, or mesh axes. The empty list `{}` means one group of all `devices`.
    """
    if pairs := re.search(r"source_target_pairs=\{(.*?\})\}", text):
        return np.array([_integers(pair) for pair in re.findall(r"\{([\d,]+)\}", pairs[1])])
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

    In this example, `'b'` is a whole axis. `'a':(2)4` is the minor part (4) of axis a, which is split as 2 × 4.
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
    """Parse an iota such as `[2,4]T(1,0)`: the numbers 0 … 7 in shape (2, 4), transposed by (1, 0) and flattened."""
    shape, _, order = text.partition("T")
    sizes = _integers(shape.strip("[]"))
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return (ids.transpose(_integers(order.strip("()"))) if order else ids).reshape(-1)


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def type_bytes(text: str) -> float:
    """Return the size in bytes of an HLO type: an array such as `bf16[8,128]{1,0}`, or a tuple of arrays."""
    total = 0.0
    for dtype, shape in _ARRAY.findall(text):
        # The first number in the name is the number of bits, as in bf16, c64 and f8e4m3fn. token[] takes no memory.
        bits = 8 if dtype == "pred" else int(next(iter(re.findall(r"\d+", dtype)), 0))
        total += bits / 8 * math.prod(int(n.lstrip("<=")) for n in shape.split(",") if n)
    return total


def _parse_computations(body: str) -> tuple[dict[str, list[_Instruction]], str]:
    """Return the instructions of each computation by its name, and the name of the entry computation."""
    computations: dict[str, list[_Instruction]] = {}
    entry, current = "", []
    for line in body.splitlines():
        if not line.startswith((" ", "}")) and (header := _HEADER.match(line)):
            current = computations[header[1]] = []
            entry = header[1] if line.startswith("ENTRY") else entry
        elif match := _INSTRUCTION.match(line):
            name, rest = match.groups()
            end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
            opening = rest.index("(", end)
            closing = _closing(rest, opening)
            opcode, operands = rest[end:opening].strip(), rest[opening + 1 : closing]
            current.append(_Instruction(name, rest[:end], opcode, operands, rest[closing + 1 :]))
    return computations, entry


def _constant(instructions: Sequence[_Instruction]) -> int | None:
    return next((int(i.operands) for i in instructions if i.opcode == "constant" and i.operands.isdigit()), None)


def _names(operands: str) -> list[str]:
    return re.findall(r"%([\w.$-]+)", operands)


def _closing(text: str, opening: int) -> int:
    """Return the index of the parenthesis that closes the parenthesis at index `opening`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, opening):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"an unclosed parenthesis in HLO: {text[opening : opening + 80]}")
