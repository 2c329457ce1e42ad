"""What layers and stages cost, in seconds and bytes."""

from gpipe.costs.layer_costs import LayerCosts
from gpipe.costs.layer_memory import LayerMemory
from gpipe.costs.shared import SharedParameter
from gpipe.costs.size import BoundaryTensor, Size, Skip
from gpipe.costs.stage_costs import StageCosts

__all__ = [
    "BoundaryTensor",
    "LayerCosts",
    "LayerMemory",
    "SharedParameter",
    "Size",
    "Skip",
    "StageCosts",
]
