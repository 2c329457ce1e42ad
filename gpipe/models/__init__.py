"""Models to start from: each is an `nn.Sequential`."""

from gpipe.models.mlp import mlp
from gpipe.models.transformer import transformer

__all__ = ["mlp", "transformer"]
