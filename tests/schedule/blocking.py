"""The strictest run of a schedule, polled and from first principles: an oracle."""

from collections import defaultdict, deque

from gpipe.schedule import Schedule

RECEIVES = ("A<", "G<")


def runs_to_the_end(schedule: Schedule) -> bool:
    """Whether all rows come to their end; shares no code with the package."""
    blocking = _Blocking(schedule)
    while any(blocking.rows):
        moved = [blocking.step(worker) for worker, row in enumerate(blocking.rows) if row]
        if not any(moved):
            return False
    return True


class _Blocking:
    """A receive is posted and lets its worker go on. A send is posted and holds its worker.

    Of what two workers have posted to each other only the oldest on either side may meet. A worker
    computes when the data is on it: activations, gradients.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.rows = [deque(row) for row in schedule.rows]
        actions = [action for row in schedule.rows for action in row]
        self.num_stages = schedule.num_stages
        self.worker_of = {
            action.stage: worker
            for worker, row in reversed(list(enumerate(schedule.rows)))
            for action in row
        }
        self.recomputed = {action[1:3] for action in actions if action.kind == "R"}
        ways = {tuple(sorted((a.stage, a.peer))) for a in actions if a.peer is not None}
        self.has_transfers = bool(ways)
        self.skips = {(stash, pop) for stash, pop in ways if pop - stash > 1}
        self.data = set()  # (stage that has it, kind, stage that made it, micro-batch)
        self.posted = defaultdict(deque)  # (worker, other): what is still open
        self.waiting = set()  # the workers whose send is posted

    def step(self, worker: int) -> bool:
        """Let a worker do one thing, if it can."""
        action = self.rows[worker][0]
        if action.peer is None:
            return self._compute(worker, action)
        other = self.worker_of.get(action.peer)
        if action.kind in RECEIVES:
            self.posted[worker, other].append(action)
            self.rows[worker].popleft()
            return True
        return self._send(worker, other, action)

    def _compute(self, worker, action) -> bool:
        kind, stage, microbatch = action
        if not all((stage, *each, microbatch) in self.data for each in self._needed(*action)):
            return False
        for each in range(self.num_stages):
            is_near = self.worker_of.get(each) == self.worker_of[stage]
            if is_near or not self.has_transfers:
                self.data.add((each, str(kind), stage, microbatch))
        self.rows[worker].popleft()
        return True

    def _needed(self, kind, stage, microbatch):
        if kind == "R":
            return [("F", stage)]
        if kind == "F":
            before = [stage - 1] if stage > 0 else []
            return [("F", each) for each in before + [a for a, b in self.skips if b == stage]]
        behind = [stage + 1] if stage + 1 < self.num_stages else []
        own = "R" if (stage, microbatch) in self.recomputed else "F"
        gradients = [("B", each) for each in behind + [b for a, b in self.skips if a == stage]]
        return [(own, stage), *gradients]

    def _send(self, worker, other, action) -> bool:
        made = "F" if action.kind == "A>" else "B"
        if (action.stage, made, action.stage, action.microbatch) not in self.data:
            return False
        mine, theirs = self.posted[worker, other], self.posted[other, worker]
        if worker not in self.waiting:
            self.waiting.add(worker)
            mine.append(action)
            return True
        if not (mine and theirs and mine[0] == action and theirs[0] == action.partner):
            return False
        for queue in (mine, theirs, self.rows[worker]):
            queue.popleft()
        self.waiting.discard(worker)
        self.data.add((action.peer, made, action.stage, action.microbatch))
        return True
