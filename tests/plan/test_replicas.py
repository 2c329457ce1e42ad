"""What replicas add to a step: the part of their sums that the drain does not hide."""

from dataclasses import replace

import pytest

from gpipe.plan import DeviceSpec, Grid, plan, ring_s, search
from gpipe.plan.all_reduce import visible_s
from gpipe.plan.text import plan_text
from gpipe.schedule import Kind
from tests.plan.members import layer_costs

LINK = 50.0


def planned(num_replicas, **options):
    device = DeviceSpec(bandwidth_bytes_per_s=LINK)
    return plan(
        layer_costs(),
        [1, 1, 1, 1],
        rows=8,
        chunks=8,
        devices=device,
        num_replicas=num_replicas,
        **options,
    )


def test_one_replica_sums_nothing():
    assert planned(1).visible_reduce_s == 0


@pytest.mark.parametrize("schedule", ["fill_drain", "1f1b"])
def test_the_first_stage_is_done_last_and_hides_nothing(schedule):
    two = planned(2, schedule=schedule)
    alone_s = ring_s(2, two.gradient_bytes[0], LINK)
    assert two.visible_reduce_s == pytest.approx(alone_s)
    assert two.step_s == pytest.approx(planned(1, schedule=schedule).step_s + alone_s)


def test_later_stages_hide_theirs_while_the_pipeline_drains():
    timeline = planned(1).timeline
    ends = {
        stage: max(
            event.end_s
            for event in timeline.events
            if (event.action.kind, event.action.stage) == (Kind.BACKWARD, stage)
        )
        for stage in range(4)
    }
    drain_s = ends[0] - ends[3]
    assert drain_s > 0
    assert visible_s(timeline, [0, 0, 0, drain_s]) == pytest.approx(0)
    assert visible_s(timeline, [0, 0, 0, drain_s + 1]) == pytest.approx(1)


def test_a_worker_sums_one_stage_after_the_other():
    timeline = planned(1, schedule="interleaved_1f1b", num_workers=2).timeline
    assert visible_s(timeline, [5.0, 0, 7.0, 0]) > visible_s(timeline, [5.0, 0, 0, 0])


def test_no_replica_is_none():
    with pytest.raises(ValueError, match="num_replicas"):
        planned(0)
    assert replace(planned(3)).num_replicas == 3


def test_the_text_tells_of_replicas():
    text = plan_text(planned(2), "1f1b", rows=8)
    assert text.startswith("2 replicas, each 4 stages")
    assert "to sum gradients after the drain" in text
    assert "replicas" not in plan_text(planned(1), "1f1b", rows=8)


def test_a_search_plans_replicas_too():
    device = DeviceSpec(bandwidth_bytes_per_s=LINK)
    grid = Grid(num_devices=[4], chunks=[8], schedules=["1f1b"], checkpoints=["never"])
    (_, found), *_ = search(layer_costs(), grid, rows=8, devices=device, num_replicas=2).best
    assert found.step_s == planned(2, checkpoint="never").step_s
