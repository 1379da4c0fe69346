"""The picture of score against density: what is drawn comes from the run folders."""

import json
from dataclasses import replace

import matplotlib.image
import numpy as np
import pytest

from ruler_bench import manifest
from ruler_bench.records import Record, to_line
from scripts import plot_density
from scripts.plot_density import lines_of, point_of, read_runs

RECORD = Record(
    arm="persistent",
    step=0,
    ordinal=0,
    task="niah_single_1",
    length=1024,
    life=1,
    position=0,
    predecessor=None,
    expected=("123",),
    depth=0.5,
    prompt_sha256="0" * 64,
    prompt_tokens=1000,
)


def write_run(folder, policy, density, scores, **settings):
    folder.mkdir(parents=True)
    text = {
        "format_version": manifest.FORMAT_VERSION,
        "task": "niah_single_1",
        "length": 1024,
        "model": "probe",
        "metric": "all",
        "backend": "gpu_only",
        "backend_in_force": {"policy": policy},
        "lives": [],
    } | settings
    (folder / "manifest.json").write_text(json.dumps(text))
    lines = [
        to_line(
            replace(
                RECORD,
                step=number,
                ordinal=number,
                task=text["task"],
                output="123" if score else "no",
                score=score,
                correct=score == 100,
                density=density,
            )
        )
        for number, score in enumerate(scores)
    ]
    (folder / "records.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture
def sweep(tmp_path):
    """Runs as a multirun leaves them."""
    folder = tmp_path / "sweep"
    for stride in (16, 8):
        for threshold, density, right in ((0.9, 0.5, 10), (0.5, 0.2, 6)):
            policy = {"name": "xattention", "stride": stride, "threshold": threshold, "norm": 1.0}
            scores = [100.0] * right + [0.0] * (10 - right)
            write_run(folder / f"{stride}_{threshold}", policy, density, scores)
    write_run(folder / "full", {"name": "full"}, None, [100.0] * 10)
    return folder


def test_runs_of_a_policy_are_joined_by_what_varies(sweep):
    lines = {one.title: one for one in lines_of([point_of(run) for run in read_runs([sweep])])}
    assert set(lines) == {
        "full", "xattention stride=8, by threshold", "xattention stride=16, by threshold",
    }  # fmt: skip
    line = lines["xattention stride=8, by threshold"]
    assert line.labels == ["0.5", "0.9"]
    assert [one.density for one in line.points] == pytest.approx([0.2, 0.5])
    assert [one.score for one in line.points] == [60.0, 100.0]
    # Wilson's interval of 6 of 10 is 31.3 to 83.2.
    assert (line.points[0].low, line.points[0].high) == pytest.approx((31.3, 83.2), abs=0.1)
    assert lines["full"].points[0].density == 1.0


def test_the_picture_is_light_and_has_something_on_it(sweep, tmp_path, capsys):
    picture = tmp_path / "density.png"
    assert plot_density.main([str(sweep), "--out", str(picture)]) == plot_density.DONE
    pixels = matplotlib.image.imread(picture)[:, :, :3]
    assert pixels.shape[:2] == (750, 1200)
    assert np.allclose(pixels[0, 0], 1.0)
    assert 0.7 < pixels.mean() < 0.999


@pytest.mark.parametrize(
    ("more", "named"),
    [({"length": 2048}, "length"), ({"task": "niah_single_2"}, "task"), ({"model": "x"}, "model")],
)
def test_runs_that_do_not_belong_together_are_refused(sweep, tmp_path, capsys, more, named):
    folder = write_run(sweep / "other", {"name": "full"}, None, [100.0], **more)
    if "length" in more:
        path = folder / "records.jsonl"
        path.write_text(path.read_text().replace('"length": 1024', '"length": 2048'))
    status = plot_density.main([str(sweep), "--out", str(tmp_path / "x.png")])
    assert status == plot_density.WRONG
    assert f"more than one {named}" in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()


def test_a_folder_without_runs_is_refused(tmp_path, capsys):
    status = plot_density.main([str(tmp_path), "--out", str(tmp_path / "x.png")])
    assert status == plot_density.WRONG
    assert "no run" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_one_line(sweep, tmp_path, capsys):
    status = plot_density.main([str(sweep), "--out", str(tmp_path / "none" / "x.png")])
    assert status == plot_density.WRONG
    assert "cannot be written" in capsys.readouterr().err
