"""Reads what a run left behind, for the tests of this folder."""

import csv
from pathlib import Path

import torch
from safetensors.torch import load_file


def folder_of(config):
    return Path(config.runs_dir) / config.name


def metrics(config):
    with (folder_of(config) / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def column(config, name):
    return [float(row[name]) for row in metrics(config) if row[name]]


def weights(config):
    return load_file(folder_of(config) / "model" / "model.safetensors")


def assert_equal_weights(a, b, **tolerance):
    assert a.keys() == b.keys()
    for name in a:
        if tolerance:
            torch.testing.assert_close(a[name], b[name], **tolerance)
        else:
            assert torch.equal(a[name], b[name]), name
