"""Copies between the arena and a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from afferent.engines.vllm.plugin.transfer import Download, Stopwatch, upload
from afferent.store.block import torch_tensors

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
    ),
]


@pytest.mark.parametrize("device", DEVICES)
def test_upload_outlives_its_source(device: str) -> None:
    source = np.arange(1 << 20, dtype=np.uint8).reshape(2, -1)
    view = torch_tensors.as_tensor(source)
    before = view.clone()
    uploaded = upload(view, torch.device(device))
    source[...] = 7
    assert uploaded.device.type == device
    assert torch.equal(uploaded.cpu(), before)


def test_upload_takes_read_only_memory() -> None:
    source = np.arange(256, dtype=np.uint8)
    source.flags.writeable = False
    assert torch.equal(
        upload(torch_tensors.as_tensor(source), torch.device("cpu")),
        torch.arange(256, dtype=torch.uint8),
    )


@pytest.mark.parametrize("device", DEVICES)
def test_download_is_a_copy_of_the_rows_as_they_were(device: str) -> None:
    started = Stopwatch(torch.device(device))
    rows = torch.ones(2000, 1000, device=device)
    for _ in range(10):
        rows = rows + 1
    made = [rows[:5], rows[5:]]
    download = Download(made, started)
    rows.zero_()
    assert download.wait() > 0
    assert [each.device.type for each in download.rows] == ["cpu", "cpu"]
    assert torch.equal(torch.cat(download.rows), torch.full((2000, 1000), 11.0))


@pytest.mark.parametrize("device", DEVICES)
def test_time_of_a_download_ends_before_its_copies(device: str) -> None:
    started = Stopwatch(torch.device(device))
    rows = torch.ones(10, 10, device=device)
    download = Download([rows], started)
    first = download.wait()
    assert download.wait() == first
