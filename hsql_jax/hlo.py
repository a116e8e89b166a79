"""What a compiled program moves, summed over its HLO text: collectives and memory traffic.

XLA's own `cost_analysis` counts the body of a loop once. Here a loop counts as often as it runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")

# What a device sends of its operand of `b` bytes in a group of n, in the best ring algorithm.
SENT: dict[str, Callable[[int], float]] = {
    "all-gather": lambda n: n - 1,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}

# Operations that touch no memory of their own: names for other values, and control flow.
FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id "
    "while conditional call async-start async-update async-done opt-barrier".split()
)

CALLERS = ("while", "conditional", "call", "fusion", "async-start")

_INSTRUCTION = re.compile(r"\s*(ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{\s*$")
_ARRAY = re.compile(r"([a-z]+)(\d*)\w*\[([\d,]*)\](\{[^}]*\})?")
_CALLED = re.compile(r"(?:calls|body|to_apply|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


class Op(NamedTuple):
    """One instruction: `operands` are names, `rest` is all text behind its opening bracket."""

    name: str
    shape: str
    kind: str
    operands: tuple[str, ...]
    rest: str
    root: bool


Computations = dict[str, dict[str, Op]]


class Moved(NamedTuple):
    """Collectives of one kind in one run of a program, on each device."""

    times: float
    bytes_sent: float


class Traffic(NamedTuple):
    """What one run of a program moves on each device."""

    memory_bytes: float  # read and written by each operation, nothing kept in between
    collectives: dict[str, Moved]


def traffic(text: str, devices: int, unknown_trips: Sequence[int] = ()) -> Traffic:
    """The sums over `compiled.as_text()`, of one run.

    Loops without a known count run `unknown_trips` times, from the outermost in; deeper ones count
    once. All branches of a conditional are counted.
    """
    computations, entry = parse(text)
    memory, sums = 0.0, dict.fromkeys(COLLECTIVES, Moved(0.0, 0.0))
    for name, op, times, fused in _walk(computations, entry, unknown_trips):
        scope = computations[name]
        if kind := _collective(op, name):
            size = _operand_bytes(scope, op, anywhere=True)
            sent = SENT[kind](_group_size(op.rest, devices)) * size
            sums[kind] = Moved(sums[kind].times + times, sums[kind].bytes_sent + times * sent)
        if not fused:
            memory += times * _memory_bytes(computations, scope, op)
    return Traffic(memory, {kind: moved for kind, moved in sums.items() if moved.times})


def parse(text: str) -> tuple[Computations, str]:
    """The program's computations by name, and the name of its entry."""
    computations: Computations = {}
    entry, scope = "", {}
    for line in text.splitlines():
        if found := _INSTRUCTION.match(line):
            root, name, shape, kind, rest = found.groups()
            operands = tuple(re.findall(r"%([\w.-]+)", rest.split("), ", 1)[0]))
            scope[name] = Op(name, shape, kind, operands, rest, bool(root))
        elif found := _COMPUTATION.match(line):
            scope = computations[found[2]] = {}
            entry = found[2] if found[1] else entry
    return computations, entry


def _walk(
    computations: Computations, entry: str, unknown_trips: Sequence[int]
) -> Iterator[tuple[str, Op, float, bool]]:
    """Every instruction that runs: its computation, itself, how often, and whether it is fused."""
    stack = [(entry, 1.0, [*unknown_trips], False)]
    while stack:
        name, times, unknown, fused = stack.pop()
        for op in computations[name].values():
            yield name, op, times, fused
            if op.kind not in CALLERS:
                continue  # the function of a reduction, applied to scalars
            inner, left = times, unknown
            if op.kind == "while":
                trips = _trips(computations, op)
                inner *= trips or (unknown or [1])[0]
                left = unknown if trips else unknown[1:]
            called = _CALLED.findall(op.rest)
            for branches in _BRANCHES.findall(op.rest):
                called += [branch.strip(" %") for branch in branches.split(",")]
            fusion = fused or op.kind == "fusion"
            stack += [(callee, inner, left, fusion) for callee in called]


def _trips(computations: Computations, op: Op) -> int | None:
    """How often a loop runs, where the compiler notes it or its condition is `i < constant`."""
    if known := _TRIPS.search(op.rest):
        return int(known[1])
    condition = re.search(r"condition=%?([\w.-]+)", op.rest)
    scope = computations[condition[1]] if condition else {}
    root = next((inner for inner in scope.values() if inner.root), None)
    if root is None or root.kind != "compare" or "direction=LT" not in root.rest:
        return None
    bound = scope[root.operands[1]]
    return int(bound.rest.split(")", 1)[0]) if bound.kind == "constant" else None


def _collective(op: Op, computation: str) -> str | None:
    """The kind of a collective. To the TPU compiler a reduce-scatter is an all-reduce, sliced."""
    kind = op.kind.removesuffix("-start")
    if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
        return "reduce-scatter"
    return kind if kind in COLLECTIVES else None


def shape_bytes(shape: str, anywhere: bool = False) -> float:
    """Bytes in the device's main memory; of arrays in the compiler's other spaces if `anywhere`."""
    total = 0.0
    for kind, bits, dims, layout in _ARRAY.findall(shape):
        if anywhere or not re.search(r"S\([1-9]", layout):
            size = int(bits) / 8 if bits else float(kind == "pred")
            total += size * math.prod(map(int, filter(None, dims.split(","))))
    return total


def _operand_bytes(scope: dict[str, Op], op: Op, anywhere: bool = False) -> float:
    return sum(shape_bytes(scope[name].shape, anywhere) for name in op.operands if name in scope)


def _memory_bytes(computations: Computations, scope: dict[str, Op], op: Op) -> float:
    """Read and written by one operation outside of fusions; slices count what they touch."""
    if op.kind in FREE or op.kind.endswith("-done"):
        return 0.0
    if op.kind.endswith("-start"):
        return _transfer_bytes(op)
    if op.kind in ("dynamic-slice", "gather", "slice"):
        return 2 * shape_bytes(op.shape)
    if op.kind == "dynamic-update-slice":
        return 2 * shape_bytes(scope[op.operands[1]].shape)
    if op.kind != "fusion":
        return shape_bytes(op.shape) + _operand_bytes(scope, op)
    fused = computations.get(_CALLED.findall(op.rest)[0], {})
    parameters = {
        int(inner.rest.split(")", 1)[0]): inner.name
        for inner in fused.values()
        if inner.kind == "parameter"
    }
    read = sum(
        min(shape_bytes(scope[name].shape), _touched(fused, parameters.get(index, "")))
        for index, name in enumerate(op.operands)
        if name in scope
    )
    root = next((inner for inner in fused.values() if inner.root), None)
    updates = [inner for inner in fused.values() if inner.kind == "dynamic-update-slice"]
    if root is not None and updates and root.kind in ("dynamic-update-slice", "tuple", "bitcast"):
        written = sum(shape_bytes(fused[update.operands[1]].shape) for update in updates)
        return read + min(written, shape_bytes(op.shape))
    return read + shape_bytes(op.shape)


def _transfer_bytes(op: Op) -> float:
    """Of an asynchronous copy, or of the slice that it takes: its source and its target."""
    arrays = [found[0] for found in _ARRAY.finditer(op.shape) if found[3]]
    size = min((shape_bytes(array, anywhere=True) for array in arrays), default=0.0)
    return size * sum(shape_bytes(array) > 0 for array in arrays)


def _touched(fused: dict[str, Op], name: str) -> float:
    """Bytes of a fusion's parameter that are read: of the slices, where only slices are taken."""
    total = 0.0
    for user in fused.values():
        if name not in user.operands:
            continue
        if user.kind in ("dynamic-slice", "slice", "gather") and user.operands[0] == name:
            total += shape_bytes(user.shape)
        elif user.kind == "bitcast":
            total += _touched(fused, user.name)
        elif not (user.kind == "dynamic-update-slice" and user.operands[0] == name):
            return math.inf
    return total


def _group_size(rest: str, devices: int) -> int:
    """Devices that take part in one collective, from each way in which HLO writes its groups."""
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]", rest):
        return int(found[2])
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part or sizes[name]) for name, part in axes)
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return len(found[1].split(","))
    return devices
