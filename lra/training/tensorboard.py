"""Writes TensorBoard's file of a run's curves, in the thread that trains.

The writers of tensorboardX and PyTorch hand events to a thread through a queue of limited size. When that thread
fails, for example on a full disk, the run waits for ever to queue its next event. Here a failure is raised where the
row is logged.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from google.protobuf.message import DecodeError
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.record_writer import masked_crc32c

EVENT_FILES = "events.out.tfevents.*"


def start_events(rows: Sequence[Mapping[str, str]], times: Mapping[int, float]) -> bytes:
    """Returns the beginning of a file. Its rows replace all that TensorBoard has read of the run.

    Args:
        rows: the rows of metrics.csv from earlier sessions.
        times: for each step, when it was logged, in seconds since 1970, if known.
    """
    now = time.time()
    start = Event(wall_time=now, session_log=SessionLog(status=SessionLog.START))
    events = [frame_event(Event(wall_time=now, file_version="brain.Event:2")), frame_event(start)]
    for each in rows:
        values = {tag: float(value) for tag, value in each.items() if tag != "step" and value}
        events.append(encode_row(values, int(each["step"]), times.get(int(each["step"]), now)))
    return b"".join(events)


def encode_row(values: Mapping[str, float], step: int, when: float | None = None) -> bytes:
    """Encodes the values of one step."""
    summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
    return frame_event(Event(wall_time=time.time() if when is None else when, step=step, summary=summary))


def frame_event(event: Event) -> bytes:
    """Encodes an event: length and content, each with its checksum."""
    content = event.SerializeToString()
    length = struct.pack("<Q", len(content))
    checks = [struct.pack("<I", masked_crc32c(part)) for part in (length, content)]
    return length + checks[0] + content + checks[1]


def read_times(folder: Path) -> dict[int, float]:
    """Reads from the files of a folder when each step was logged. Skips damaged parts."""
    found: dict[int, float] = {}
    for file in sorted(folder.glob(EVENT_FILES)):
        content, place = file.read_bytes(), 0
        while place + 16 <= len(content):
            end = place + 12 + int.from_bytes(content[place : place + 8], "little")
            try:
                event = Event.FromString(content[place + 12 : end])
            except DecodeError:
                break
            if event.summary.value:
                found[event.step] = event.wall_time
            place = end + 4
    return found


def event_file_name() -> str:
    """Names the file of a session. TensorBoard looks for `tfevents` in it."""
    return EVENT_FILES.replace("*", f"{int(time.time())}.{socket.gethostname()}")
