import pytest

from ruler_bench.report import build_row


def test_figures_are_over_finished_samples_and_errors_stand_beside(record, run):
    row = build_row(
        run(
            record(0),
            record(1, output=" 7654321."),
            record(2, error="out of memory"),
            record(3, output=" \x00\n", finish_reason="length"),
        )
    )
    assert (row.samples, row.correct, row.errors, row.nulls, row.truncated) == (3, 1, 1, 1, 1)
    assert row.score == 33.33
    assert row.score_low_95 < 33.33 < row.score_high_95
    assert row.interval_method == "wilson"
    assert (row.task, row.length_tokens, row.arm) == ("niah_single_1", 4096, "persistent")


def test_the_metric_is_the_manifests(record, run):
    records = [record(0, output="a", expected=("a", "b")), record(1, output="-", expected=("a",))]
    assert build_row(run(*records)).score == 25.0
    assert build_row(run(*records)).interval_method == "bootstrap"
    assert build_row(run(*records, metric="part")).score == 50.0


def test_costs(record, run):
    costs = {"bytes_up": 100, "bytes_down": 10, "peak_device_bytes": 7}
    more = {"bytes_up": 300, "bytes_down": 30, "peak_device_bytes": 5}
    row = build_row(
        run(
            record(
                0,
                output_tokens=(5,) * 11,
                ttft_seconds=1.0,
                decode_seconds=2.0,
                total_seconds=3.5,
                **costs,
            ),
            record(
                1,
                output_tokens=(5,) * 21,
                ttft_seconds=3.0,
                decode_seconds=3.0,
                total_seconds=6.5,
                **more,
            ),
            record(2, output_tokens=(5,), ttft_seconds=2.0, decode_seconds=0.0, total_seconds=2.0),
            record(3, error="failed", ttft_seconds=99.0),
        )
    )
    assert row.ttft_seconds == pytest.approx(2.0)
    assert row.seconds_per_sample == pytest.approx((3.5 + 6.5 + 2) / 3)
    assert row.decode_tokens_per_second == pytest.approx((10 + 20) / 5)
    assert (row.bytes_up_per_sample, row.bytes_down_per_sample) == (200, 20)
    assert row.peak_device_bytes == 7


def test_what_a_backend_cannot_tell_stays_unknown(record, run):
    row = build_row(run(record(0)))
    assert row.seconds_per_sample is None
    assert row.ttft_seconds is None
    assert row.decode_tokens_per_second is None
    assert row.bytes_up_per_sample is None
    assert row.peak_device_bytes is None


@pytest.mark.parametrize("errors", [0, 2])
def test_without_finished_samples_there_is_no_score(record, run, errors):
    row = build_row(run(*[record(i, error="failed") for i in range(errors)]))
    assert (row.samples, row.correct, row.errors) == (0, 0, errors)
    assert row.score is row.score_low_95 is row.interval_method is None
    assert row.arm == ("persistent" if errors else None)
