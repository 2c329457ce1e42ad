"""What a watch does once a second."""

from time import monotonic

from gpipe.execution.failure import Failure
from gpipe.execution.hard_end import say
from gpipe.execution.heartbeat import Beat, Beats, Neighbour
from gpipe.execution.news import News
from gpipe.execution.stall import Stillness, left_early, missed, table

__all__ = ["Pulse"]


class Pulse:
    """Gives this rank's sign of life, looks for that of the next, and hears the news.

    All of it goes through one connection to the store and happens in one thread.
    """

    def __init__(
        self,
        beats: Beats,
        news: News,
        stillness: Stillness,
        rank: int,
        beat_s: float,
        patience_s: float,
        *,
        store_outlives_rank_0: bool,
    ) -> None:
        self._beats = beats
        self._news = news
        self._stillness = stillness
        self._neighbour = Neighbour(beats)
        self._rank = rank
        self._beat_s = beat_s
        self._patience_s = patience_s
        self._outlives_rank_0 = store_outlives_rank_0
        self._last_s = monotonic()
        self.num_turns = 0

    @property
    def is_without_store(self) -> bool:
        """Whether rank 0 has left in good order, and the store with it."""
        return self._news.host_has_left and not self._outlives_rank_0

    def turn(self) -> Failure | None:
        """One round: the first failure of the job, None while there is none."""
        elapsed_s = self._elapsed_s()
        self.num_turns += 1
        still = self._stillness
        still.look(elapsed_s)
        if self.is_without_store:  # to ask it would work or not, and print warnings of torch
            return self._without_rank_0()
        self._beats.write(Beat(self.num_turns, False, still.waits_for, round(still.still_s, 1)))
        self._neighbour.listen(elapsed_s)
        if failure := self._silence() or self._standstill():
            return self._news.post(failure)
        return self._news.read()

    def close(self, linger_s: float) -> None:
        """Leave in good order; rank 0 stays for so long at most until the others have heard."""
        if not self.is_without_store:
            self._beats.write(Beat(self.num_turns + 1, has_left=True))
            self._news.close(linger_s)

    def _elapsed_s(self) -> float:
        now_s = monotonic()
        elapsed_s, self._last_s = now_s - self._last_s, now_s
        # A longer turn means that this process was stopped, and perhaps the others with it.
        return min(elapsed_s, 2 * self._beat_s)

    def _silence(self) -> Failure | None:
        if self._neighbour.silent_s < self._patience_s:
            return None
        error = (
            f"it has given no sign of life for {self._patience_s:g} s: it was killed or stopped, "
            "its machine is unreachable, or a call in it holds Python's lock."
        )
        return Failure(self._neighbour.rank, error)

    def _without_rank_0(self) -> Failure | None:
        if self._stillness.still_s < self._patience_s:
            return None
        return left_early(0, f"rank {self._rank} still waits: {self._stillness.waits_for}")

    def _standstill(self) -> Failure | None:
        still = self._stillness
        is_long = still.still_s >= self._patience_s
        if not is_long and not still.is_to_be_told:
            return None
        beats = self._beats.read_others()
        if still.is_to_be_told and still.speaks_for_all(self._rank, beats):
            say(table(self._rank, still, beats))
        return missed(self._rank, still, beats, self._patience_s) if is_long else None
