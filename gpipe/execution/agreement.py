"""Whether all ranks were started alike."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from time import monotonic, sleep

from torch._C._distributed_c10d import ProcessGroup, Store

from gpipe.errors import ConfigError, StageError

__all__ = ["require_agreement"]

Facts = Mapping[str, str | int]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1  # between two looks
_num_calls: Counter[str] = Counter()


def require_agreement(
    group_or_store: ProcessGroup | Store,
    rank: int,
    num_ranks: int,
    facts: Facts,
    *,
    name: str = "",
    timeout_s: float = 120.0,
    look: Callable[[], object] = lambda: None,
) -> None:
    """Compare what should be the same on every rank; every rank calls it as often.

    Args:
        group_or_store: Through whose store the ranks talk; it is no collective.
        rank: That of this process among those that compare.
        num_ranks: How many they are.
        facts: Name and value; of several that differ the first is told, as rank 0 orders them.
        name: Tells apart the groups of ranks that share a store.
        timeout_s: How long to wait for the other ranks.
        look: Called again and again meanwhile; may raise.

    Raises:
        ConfigError: A fact differs: its values, each with the ranks that have it. All ranks raise
            the same.
        StageError: A rank has not come in time.
    """
    store = _store(group_or_store)
    number = _num_calls[name]
    _num_calls[name] += 1
    keys = [f"gpipe/agreement/{name}/{number}/{each}" for each in range(num_ranks)]
    store.set(keys[rank], json.dumps(dict(facts)))
    _await(store, keys, timeout_s, look)
    told = [json.loads(store.get(key)) for key in keys]
    for fact in dict.fromkeys(fact for each in told for fact in each):
        values = [json.dumps(each[fact]) if fact in each else "nothing" for each in told]
        if len(set(values)) > 1:
            raise ConfigError(_difference(fact, values))


def _store(group_or_store: ProcessGroup | Store) -> Store:
    if isinstance(group_or_store, Store):
        return group_or_store
    return group_or_store.get_group_store()


def _await(store: Store, keys: list[str], timeout_s: float, look: Callable[[], object]) -> None:
    # `store.wait` would not hear Ctrl-C, and torch prints each of its timeouts.
    deadline_s, pause_s = monotonic() + timeout_s, _FIRST_PAUSE_S
    while not store.check(keys):
        look()
        if monotonic() > deadline_s:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise _absent(missing, timeout_s)
        sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _absent(ranks: list[int], timeout_s: float) -> StageError:
    have = "has" if len(ranks) == 1 else "have"
    return StageError(
        f"{_ranks(ranks).capitalize()} {have} not come within {timeout_s:g} s to compare what all "
        "ranks must share. Look at the output there, and build the same pipeline on every rank.",
        ranks[0],
    )


def _difference(fact: str, values: list[str]) -> str:
    ranks_by_value = defaultdict(list)
    for rank, value in enumerate(values):
        ranks_by_value[value].append(rank)
    groups = "; ".join(f"{value} on {_ranks(ranks)}" for value, ranks in ranks_by_value.items())
    return (
        f"The ranks differ in {fact}: {groups}. Start every rank with the same program, run file "
        "and arguments."
    )


def _ranks(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
