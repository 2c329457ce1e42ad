from itertools import product

import pytest
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    _add_send_recv,
    _simulate_comms_compute,
)

from gpipe.errors import ScheduleError
from gpipe.schedule import (
    LOOPED_SCHEDULES,
    SCHEDULES,
    add_recompute,
    add_transfers,
    check,
    from_csv,
    one_f_one_b,
    to_csv,
)
from tests.schedule.members import builders


class Reader(PipelineScheduleMulti):
    """As much of torch's schedule as its own reader and writer of files need."""

    def __init__(self, schedule):
        self.pipeline_order = {}
        self._num_stages = schedule.num_stages
        self._n_microbatches = schedule.num_microbatches
        self.pp_group_size = schedule.num_workers
        self._stages = []


def read_by_torch(schedule, path):
    path.write_text(to_csv(schedule))
    reader = Reader(schedule)
    reader._load_csv(str(path))
    return reader


def test_the_form_is_stage_letter_microbatch():
    assert to_csv(one_f_one_b(2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_torch_reads_what_is_written_and_writes_what_is_read(tmp_path):
    # torch's reader also validates the order and derives which rank has which stage.
    for name, num_workers, v, num_microbatches, schedule in builders((1, 2, 4), (1, 2), (1, 3, 8)):
        reader = read_by_torch(schedule, tmp_path / "to_torch.csv")
        told = {stage: schedule.worker_of(stage) for stage in range(schedule.num_stages)}
        assert reader.stage_index_to_group_rank == told, (name, num_workers, v, num_microbatches)
        reader._dump_csv(str(tmp_path / "from_torch.csv"))
        assert from_csv((tmp_path / "from_torch.csv").read_text()) == schedule


@pytest.mark.parametrize("name", [*sorted(SCHEDULES), *sorted(LOOPED_SCHEDULES)])
def test_torch_finds_that_it_runs_to_its_end(name, tmp_path):
    build = SCHEDULES.get(name) or (lambda k, m: LOOPED_SCHEDULES[name](k, 2, m))
    for num_workers, num_microbatches in product((2, 3), (1, 2, 5)):
        schedule = build(num_workers, num_microbatches)
        order = read_by_torch(schedule, tmp_path / "order.csv").pipeline_order
        sent = _add_send_recv(order, schedule.worker_of, schedule.num_stages)
        simulated = _simulate_comms_compute(sent, schedule.worker_of, schedule.num_stages)
        assert all(simulated.values())


def test_recomputes_and_transfers_are_left_out():
    schedule = one_f_one_b(3, 4)
    assert to_csv(add_transfers(add_recompute(schedule, "always"), [(0, 2)])) == to_csv(schedule)


def test_a_schedule_of_torch_is_read(tmp_path):
    # Empty cells are its bubbles.
    text = "0F0,0F1,,2F0,2F1,,,2B0,2B1,0B0,0B1\n,1F0,1F1,,3F0,3B0,3F1,3B1,1B0,1B1\n"
    schedule = from_csv(text)
    assert (schedule.num_workers, schedule.num_stages, schedule.num_microbatches) == (2, 4, 2)
    check(schedule)


@pytest.mark.parametrize("cell", ["0I0", "0W0", "0SEND_F0", "(0F0;1B0)OVERLAP_F_B", "F0", "0F"])
def test_what_has_no_counterpart_here_is_refused(cell):
    with pytest.raises(ScheduleError, match=r"in line 2 is neither a forward nor a whole backward"):
        from_csv(f"0F0,0B0\n{cell}\n")
