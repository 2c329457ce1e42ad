"""What each layer costs, as measured."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate, pairwise
from operator import add
from os import PathLike
from typing import Self

from gpipe.arguments import require_count
from gpipe.costs.file import read_costs, refused, write_costs
from gpipe.costs.layer_memory import LayerMemory
from gpipe.costs.number import Numbers, require_number, require_numbers
from gpipe.costs.shared import SharedParameter, require_parts, shared_parameter
from gpipe.costs.stage_costs import StageCosts

__all__ = ["LayerCosts"]

PER_LAYER = (
    "forward_s",
    "backward_s",
    "forward_fixed_s",
    "backward_fixed_s",
    "parameter_bytes",
    "buffer_bytes",
    "gradient_bytes",
    "cast_bytes",
)
MAY_BE_UNKNOWN = ("forward_flops_per_row", "backward_flops_per_row")
ADDED_LATER = {"cast_bytes", "shared"}  # files of an earlier gpipe lack them


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Time and memory of each layer, from which follow those of any stages.

    There is one number per layer, finite and at least 0; what is left out is 0. Lists are taken,
    too, and become tuples.

    Attributes:
        names: The names of the layers in the Sequential.
        rows: Those of the sample with which the layers were measured.
        dtype: That of the parameters, such as "float32".
        device: Where the layers were measured, such as "cpu" or "cuda:0".
        memory: What the layers save and pass on.
        num_threads: How many threads an operation could use, where the device is the CPU.
        forward_s: Seconds of a forward of the sample.
        backward_s: Seconds of its backward.
        forward_fixed_s: The part of `forward_s` that does not grow with the rows.
        backward_fixed_s: The part of `backward_s` that does not grow with the rows.
        is_proportional: Whether the layer was timed with one number of rows only: its times are
            then taken to grow with the rows, without a fixed part.
        parameter_bytes: Of the parameters; one that several layers share is counted by each.
        buffer_bytes: Of the buffers.
        gradient_bytes: Of the gradients, those of trainable parameters.
        cast_bytes: Of the copies of parameters that autocast has cast and keeps for a mini-batch.
        shared: The parameters that several layers have.
        forward_flops_per_row: Floating-point operations of a forward; None: not known.
        backward_flops_per_row: Those of a backward; None: not known.
        action_s: Seconds that an action of a stage takes besides its layers.

    Raises:
        TypeError: Something that should be a number is none.
        ValueError: A number cannot be, or there are too many or too few.
    """

    names: tuple[str, ...]
    rows: int
    dtype: str
    device: str
    memory: LayerMemory
    num_threads: int = 1
    forward_s: Numbers = ()
    backward_s: Numbers = ()
    forward_fixed_s: Numbers = ()
    backward_fixed_s: Numbers = ()
    is_proportional: tuple[bool, ...] = ()
    parameter_bytes: Numbers = ()
    buffer_bytes: Numbers = ()
    gradient_bytes: Numbers = ()
    cast_bytes: Numbers = ()
    shared: tuple[SharedParameter, ...] = ()
    forward_flops_per_row: Numbers | None = None
    backward_flops_per_row: Numbers | None = None
    action_s: float = 0.0

    def __post_init__(self) -> None:
        num_layers = require_count("num_layers", len(self.names))
        require_count("rows", self.rows)
        require_count("num_threads", self.num_threads)
        require_number("action_s", self.action_s)
        self._set("names", tuple(self.names))
        self._set("is_proportional", tuple(self.is_proportional) or (True,) * num_layers)
        for name in PER_LAYER:
            self._set(name, tuple(getattr(self, name)) or (0.0,) * num_layers)
        for name in MAY_BE_UNKNOWN:
            numbers = getattr(self, name)
            self._set(name, None if numbers is None else tuple(numbers))
        self._set("shared", tuple(shared_parameter(*each) for each in self.shared))
        self._require_numbers()
        require_parts(self.shared, self.parameter_bytes, self.gradient_bytes)
        self._require_parts("forward")
        self._require_parts("backward")

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.names)

    @property
    def times_s(self) -> Numbers:
        """Seconds of a forward and a backward of each layer."""
        return tuple(map(add, self.forward_s, self.backward_s))

    @property
    def saved_bytes_per_row(self) -> Numbers:
        """What each layer is the first to save of a row: added up, what the whole model saves."""
        return self.memory.saved_bytes_per_row

    @property
    def output_bytes_per_row(self) -> Numbers:
        """What each layer returns of a row."""
        return self.memory.output_bytes_per_row

    def stage_costs(
        self,
        balance: Sequence[int],
        rows_per_microbatch: int,
        *,
        bandwidth_bytes_per_s: Sequence[float] = (),
        latency_s: Sequence[float] = (),
    ) -> StageCosts:
        """What stages of these layers cost.

        A stage holds the storages that its layers save, each once, and its input, whose storage is
        not counted again where a layer saves it.

        Args:
            balance: The number of layers of each stage.
            rows_per_microbatch: Rows of each micro-batch, of the largest if they differ.
            bandwidth_bytes_per_s: Of each edge between two stages; left out: no limit.
            latency_s: Of each edge.

        Raises:
            TypeError: A count is no whole number.
            ValueError: The balance is not one of these layers, or there are no rows.
        """
        rows = require_count("rows_per_microbatch", rows_per_microbatch)
        stages = _stages(balance, self.num_layers)
        inputs = [self.memory.input_bytes(stage, rows) for stage in stages]
        insides = [self.memory.inside_bytes(stage, rows) for stage in stages]
        return StageCosts(
            forward_s=self._actions(stages, rows, self.forward_s, self.forward_fixed_s),
            backward_s=self._actions(stages, rows, self.backward_s, self.backward_fixed_s),
            boundary_bytes=tuple(self.memory.output_bytes(stage, rows) for stage in stages),
            held_bytes=tuple(map(add, inputs, insides)),
            input_bytes=tuple(inputs),
            bandwidth_bytes_per_s=tuple(bandwidth_bytes_per_s),
            latency_s=tuple(latency_s),
            skip_bytes=self.memory.skip_bytes(stages, rows),
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Writes everything to a JSON file.

        Raises:
            OSError: It cannot be written.
        """
        write_costs(path, asdict(self))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Reads what `save` has written.

        Raises:
            ConfigError: The file is damaged, of something else, or of another version.
            OSError: It cannot be read.
        """
        content = read_costs(path)
        missing = {field.name for field in fields(cls)} - content.keys() - ADDED_LATER
        if missing:
            raise refused(path, f"lacks {sorted(missing)}")
        try:
            return cls(**content | {"memory": LayerMemory(**content["memory"])})
        except (TypeError, ValueError) as error:
            raise refused(path, f"holds costs that cannot be ({error})") from error

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _require_numbers(self) -> None:
        lengths = {"is_proportional": len(self.is_proportional), "memory": self.memory.num_layers}
        for name, length in lengths.items():
            if length != self.num_layers:
                raise ValueError(
                    f"`{name}` is of {length} layers, and there are {self.num_layers}."
                )
        for name in (*PER_LAYER, *MAY_BE_UNKNOWN):
            numbers = getattr(self, name)
            if numbers is not None:
                require_numbers(name, numbers, self.num_layers, "layers")

    def _require_parts(self, kind: str) -> None:
        whole, fixed = getattr(self, f"{kind}_s"), getattr(self, f"{kind}_fixed_s")
        for layer, (number_s, part_s) in enumerate(zip(whole, fixed, strict=True)):
            if part_s > number_s:
                raise ValueError(
                    f"`{kind}_fixed_s[{layer}]` is {part_s}, and `{kind}_s[{layer}]` is "
                    f"{number_s}. Give a part of it."
                )

    def _actions(
        self, stages: Sequence[range], rows: int, whole_s: Numbers, fixed_s: Numbers
    ) -> Numbers:
        of_layers = self._at(rows, whole_s, fixed_s)
        return tuple(self.action_s + time_s for time_s in _sums(of_layers, stages))

    def _at(self, rows: int, whole_s: Numbers, fixed_s: Numbers) -> Numbers:
        scale = rows / self.rows
        parts = zip(whole_s, fixed_s, strict=True)
        return tuple(fixed + (whole - fixed) * scale for whole, fixed in parts)


def _stages(balance: Sequence[int], num_layers: int) -> list[range]:
    sizes = [require_count(f"balance[{stage}]", size) for stage, size in enumerate(balance)]
    if sum(sizes) != num_layers:
        raise ValueError(
            f"balance is {sizes}, which is {sum(sizes)} layers, but the costs are those of "
            f"{num_layers}. Let the entries add up to {num_layers}."
        )
    return [range(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]


def _sums(numbers: Numbers, stages: Sequence[range]) -> Numbers:
    return tuple(sum(numbers[layer] for layer in stage) for stage in stages)
