from gpipe import schedule


def test_the_public_names_are_a_list():
    assert schedule.__all__ == [
        "LOOPED_SCHEDULES",
        "RECOMPUTE_MODES",
        "SCHEDULES",
        "SCHEDULE_NAMES",
        "Action",
        "Builder",
        "Kind",
        "LoopedBuilder",
        "Schedule",
        "Transfer",
        "add_recompute",
        "add_transfers",
        "as_schedule",
        "check",
        "fill_drain",
        "from_csv",
        "from_text",
        "grid",
        "interleaved_1f1b",
        "load_schedule",
        "looped_breadth_first",
        "one_f_one_b",
        "peak_held",
        "picture",
        "predecessors",
        "resolve",
        "save_schedule",
        "to_csv",
        "to_text",
        "unit_slots",
    ]
    assert all(hasattr(schedule, name) for name in schedule.__all__)


def test_a_function_that_is_named_as_its_module_is_the_function():
    names = ("check", "fill_drain", "looped_breadth_first", "one_f_one_b")
    assert all(callable(getattr(schedule, name)) for name in names)
