"""Models to start from: each is an `nn.Sequential`."""

from gpipe.models.mlp import mlp
from gpipe.models.transformer import next_token_loss, transformer

__all__ = ["mlp", "next_token_loss", "transformer"]
