from gpipe import schedule


def test_the_public_names_are_a_list():
    assert schedule.__all__ == [
        "RECOMPUTE_MODES",
        "SCHEDULES",
        "Action",
        "Builder",
        "Kind",
        "Schedule",
        "add_recompute",
        "check",
        "fill_drain",
        "grid",
        "one_f_one_b",
        "peak_held",
        "picture",
        "predecessors",
        "resolve",
        "unit_slots",
    ]
    assert all(hasattr(schedule, name) for name in schedule.__all__)


def test_a_function_that_is_named_as_its_module_is_the_function():
    names = ("check", "fill_drain", "one_f_one_b")
    assert all(callable(getattr(schedule, name)) for name in names)
