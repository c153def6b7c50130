"""Reads what Weights & Biases wrote offline: the frames of its log (LevelDB's), a protocol buffer in each."""

import json
import struct

import wandb
from wandb.proto.wandb_internal_pb2 import Record

BLOCK = 32_768
HEADER = struct.Struct(
    "<IHB"
)  # checksum, length, and which part of a record: 1 all, 2 first, 3 middle, 4 last


def records(path):
    wandb.teardown()  # its process writes on after a run has finished
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    place, record = 7, b""
    while place + HEADER.size <= len(data):
        left = BLOCK - place % BLOCK
        if left < HEADER.size:
            place += left
            continue
        _, length, part = HEADER.unpack_from(data, place)
        place += HEADER.size
        piece = data[place : place + length]
        place += length
        if len(piece) < length:
            return  # cut off by the end of the process
        record = piece if part in (1, 2) else record + piece
        if part in (1, 4):
            yield Record.FromString(record)


def _values(items):
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def read(path):
    """The run id, what was logged, the configuration and the declared axes."""
    run, history, config, axes = "", [], {}, []
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            history.append(_values(record.history.item))
        elif kind == "run":
            run = record.run.run_id
            config |= _values(record.run.config.update)
        elif kind == "config":
            config |= _values(record.config.update)
        elif kind == "metric":
            axes.append(record.metric.name)
    return run, history, config, axes
