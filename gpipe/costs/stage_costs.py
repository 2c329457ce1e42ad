"""What each stage costs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from gpipe.arguments import require_count
from gpipe.costs.number import Numbers, require_number, require_numbers

__all__ = ["StageCosts"]

PER_STAGE = (
    "forward_s",
    "backward_s",
    "recompute_s",
    "boundary_bytes",
    "held_bytes",
    "input_bytes",
)
PER_EDGE = ("bandwidth_bytes_per_s", "latency_s")


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Time and memory of one micro-batch, stage by stage, and of the edges between stages.

    There is one number per stage (K of them), or per edge (K - 1; edge s is the one behind stage
    s), finite and at least 0; what is left out is 0. Lists are taken, too, and become tuples.

    Attributes:
        forward_s: Seconds of a forward.
        backward_s: Seconds of a backward, without recompute.
        recompute_s: Seconds of a recompute; left out: those of the forward.
        boundary_bytes: What a stage sends to the next one, and gets the gradient of: as many
            bytes. That of the last stage is sent nowhere.
        held_bytes: What a micro-batch with its graph holds for its backward, its input included:
            from the start of its forward, or of its recompute where it has one, to the end of its
            backward.
        input_bytes: What a micro-batch that is recomputed holds until then: from the start of its
            forward.
        bandwidth_bytes_per_s: Of each edge, in either direction; 0 for no limit.
        latency_s: Seconds of each transfer over an edge, whatever its size.
        skip_bytes: What a skip carries, by (stash stage, pop stage). It travels directly, as fast
            as the slowest edge between its stages.

    Raises:
        TypeError: Something that should be a number is none.
        ValueError: A number is negative or not finite, there are too many or too few, or a skip
            does not lead to a later stage.
    """

    forward_s: Numbers
    backward_s: Numbers
    recompute_s: Numbers = ()
    boundary_bytes: Numbers = ()
    held_bytes: Numbers = ()
    input_bytes: Numbers = ()
    bandwidth_bytes_per_s: Numbers = ()
    latency_s: Numbers = ()
    skip_bytes: Mapping[tuple[int, int], float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        num_stages = require_count("num_stages", len(self.forward_s))
        parts = ((PER_STAGE, num_stages, "stages"), (PER_EDGE, num_stages - 1, "edges"))
        for names, length, what in parts:
            for name in names:
                default = self.forward_s if name == "recompute_s" else (0,) * length
                numbers = tuple(getattr(self, name)) or default
                require_numbers(name, numbers, length, what)
                object.__setattr__(self, name, numbers)
        object.__setattr__(self, "skip_bytes", _require_skips(self.skip_bytes, num_stages))

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        forward_s: float = 1.0,
        backward_s: float = 2.0,
        **others: float,
    ) -> Self:
        """The same costs for every stage and every edge.

        Args:
            num_stages: Stages of the model (K), at least 1.
            forward_s: Seconds of a forward.
            backward_s: Seconds of a backward, without recompute.
            others: Further attributes, each one number.
        """
        num_stages = require_count("num_stages", num_stages)
        each: dict[str, Any] = {
            name: (number,) * (num_stages - (name in PER_EDGE)) for name, number in others.items()
        }
        stages = range(num_stages)
        return cls(
            forward_s=tuple(forward_s for _ in stages),
            backward_s=tuple(backward_s for _ in stages),
            **each,
        )

    @property
    def num_stages(self) -> int:
        """The number of stages (K)."""
        return len(self.forward_s)

    def transfer_s(self, stage: int, peer: int) -> float:
        """Seconds from `stage` to `peer` or back: for their boundary, if neighbours, and a skip."""
        stash, pop = sorted((stage, peer))
        num_bytes = self.skip_bytes.get((stash, pop), 0)
        num_bytes += self.boundary_bytes[stash] if pop == stash + 1 else 0
        edges = range(stash, pop)
        slowness = max(1 / speed if speed else 0 for speed in self.bandwidth_bytes_per_s[stash:pop])
        return max(self.latency_s[edge] for edge in edges) + num_bytes * slowness


def _require_skips(
    skip_bytes: Mapping[tuple[int, int], float], num_stages: int
) -> dict[tuple[int, int], float]:
    for (stash, pop), number in skip_bytes.items():
        if not 0 <= stash < pop < num_stages:
            raise ValueError(
                f"`skip_bytes` names a skip from stage {stash} to stage {pop} of {num_stages}. "
                "Name a stage, counted from 0, and a later one."
            )
        require_number(f"skip_bytes[{stash}, {pop}]", number)
    return dict(skip_bytes)
