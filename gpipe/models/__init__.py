"""Models to start from: each is an `nn.Sequential`."""

from gpipe.models.mlp import mlp

__all__ = ["mlp"]
