"""What a stage was seen to do, so that only what is needed is done for it."""

from dataclasses import dataclass, field

from gpipe.stage.buffers import Buffer

__all__ = ["Habits"]


@dataclass
class Habits:
    """What the layers of one stage do, learnt while they run; nothing is run only to find out.

    Attributes:
        modifies_input: Whether they write into what they are given; None: not seen yet.
        keeps_layout: Whether gradients of the inputs come with the strides of the inputs; None: not
            seen yet.
        drawing: The positions of the layers that draw random numbers, or look at a generator.
        replays: Whether one of them looks at its state, so as to draw the same in its backward.
        knows_drawing: Whether a whole mini-batch has shown which layers draw.
        changing_buffers: The buffers that a forward changes; None: not seen yet.
    """

    modifies_input: bool | None = None
    keeps_layout: bool | None = None
    drawing: set[int] = field(default_factory=set)
    replays: bool = False
    knows_drawing: bool = False
    changing_buffers: set[Buffer] | None = None

    def may_draw(self, position: int) -> bool:
        """Whether the layer at this position must be given random numbers of its own."""
        return not self.knows_drawing or position in self.drawing
