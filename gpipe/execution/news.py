"""The one first failure of a job, in the store."""

from time import monotonic, sleep

from torch._C._distributed_c10d import Store

from gpipe.execution.failure import Failure

__all__ = ["News"]

# Rank 0 often hosts the store. What it says last must have been read before it goes, be it that it
# has failed or that it leaves in good order; so its leave is news, too, and may stand first.
_PLACES = ("news/0", "news/1")
_HOST_LEAVES = "rank 0 leaves"
_LOOK_S = 0.02


class News:
    """What has happened in the job, read through one connection to the store."""

    def __init__(self, store: Store, rank: int, num_ranks: int) -> None:
        self._store = store
        self._rank = rank
        self._num_readers = num_ranks - 1
        self._num_read = 0
        self.host_has_left = False

    def post(self, failure: Failure) -> Failure:
        """Tell a failure, unless there was one.

        Returns:
            The first one, the same for every rank.
        """
        for key in _PLACES:
            first = self._store.compare_set(key, "", failure.to_json()).decode()
            if first != _HOST_LEAVES:
                return Failure.from_json(first)
        raise AssertionError("rank 0 leaves once")

    def read(self) -> Failure | None:
        """The first failure, None while there is none."""
        key = _PLACES[self._num_read]
        # `wait` would hear of it at once, but each of its timeouts is printed by torch.
        if not self._store.check([key]):
            return None
        text = self._store.get(key).decode()
        self._tick_off()
        if text != _HOST_LEAVES:
            return Failure.from_json(text)
        self.host_has_left = True
        return None

    def close(self, linger_s: float) -> None:
        """Read no more; as rank 0 stay until the others have read what was said."""
        if self._rank != 0:
            while self._num_read < len(_PLACES):
                self._tick_off()
            return
        self._store.compare_set(_PLACES[0], "", _HOST_LEAVES)
        deadline_s = monotonic() + linger_s
        while self._num_readers and monotonic() < deadline_s:
            if self._store.check(["all_read/0"]):
                return
            sleep(_LOOK_S)

    def _tick_off(self) -> None:
        number = self._num_read
        self._num_read += 1
        if self._rank and self._store.add(f"readers/{number}", 1) == self._num_readers:
            self._store.set(f"all_read/{number}", "")
