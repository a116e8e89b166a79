"""Reads TensorBoard's event files as TensorBoard does."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event, SessionLog


def read_events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The (step, value) pairs of each tag; where a later run starts, what it repeats is dropped."""
    curves: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in _records(path.read_bytes()):
            if event.session_log.status == SessionLog.START:
                for tag, points in curves.items():
                    curves[tag] = [point for point in points if point[0] < event.step]
            for value in event.summary.value:
                curves[value.tag].append((event.step, value.simple_value))
    return dict(curves)


def _records(data: bytes) -> Iterator[Event]:
    """A record is its length (8 bytes), a checksum (4), the event, and a checksum (4)."""
    place = 0
    while place + 12 <= len(data):
        (size,) = struct.unpack_from("<Q", data, place)
        if place + size + 16 > len(data):
            return  # the run was killed while it wrote
        yield Event.FromString(data[place + 12 : place + 12 + size])
        place += size + 16
