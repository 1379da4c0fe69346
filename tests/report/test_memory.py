"""Planned memory and its share of the limits, from the manifest of a real run and from others."""

import json
import re

import pytest

from ruler_bench.report.memory import planned_memory


def manifest(**settings):
    return {"arms": {"persistent": {"settings": settings}}}


def test_a_run_within_limits_shows_its_share_on_the_page(cli, workdir):
    mine = ("backend=offload", "device=cpu", "length=512", "num_samples=1", "out=here")
    limits = ("backend.device_memory_gb=1", "backend.host_memory_gb=0.5")
    assert cli(*mine, *limits).status in (0, 1)
    held = json.loads((workdir / "here" / "manifest.json").read_text())
    plan = held["arms"]["persistent"]["settings"]["memory_plan"]
    found = planned_memory(held, "persistent")
    share = round(100 * plan["device_bytes"] / 2**30)
    assert found["planned on the device"].endswith(f" MiB, {share}% of 1.00 GiB")
    share = round(100 * plan["host_bytes"] / 2**29)
    assert found["planned in CPU memory"].endswith(f" MiB, {share}% of 512.0 MiB")
    page = (workdir / "here" / "report.html").read_text()
    for title, text in found.items():
        assert title in page
        assert re.search(re.escape(text), page)


def test_without_limits_there_is_no_share():
    found = planned_memory(
        manifest(memory_plan={"device_bytes": 1 << 20, "host_bytes": 0}), "persistent"
    )
    assert found == {"planned on the device": "1.0 MiB", "planned in CPU memory": "0 MiB"}


@pytest.mark.parametrize(
    "held",
    [
        {},
        {"arms": []},
        {"arms": {"persistent": None}},
        manifest(),
        manifest(memory_plan=5),
        manifest(memory_plan={"device_bytes": "many"}, device_memory_gb="all"),
    ],
    ids=str,
)
def test_what_an_engine_does_not_tell_is_left_out(held):
    assert planned_memory(held, "persistent") == {}
