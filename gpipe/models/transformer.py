"""The decoder-only Transformer as an `nn.Sequential`."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe.arguments import require_count

__all__ = ["next_token_loss", "transformer"]


def transformer(
    num_blocks: int,
    width: int,
    num_heads: int,
    vocabulary: int,
    hidden: int | None = None,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Builds a causal language model: an embedding, blocks, and the projection to logits.

    Each is a layer to be balanced. Parameters: 2Vd + V + L(4d² + 2dh + 9d + h) for L blocks of
    width d and hidden width h, and a vocabulary of V tokens: positions and the last normalisation
    have none, and the projection shares none with the embedding.

    Args:
        num_blocks: How many blocks (L).
        width: Of what passes between them (d), a multiple of `num_heads`.
        num_heads: Heads of attention in each block.
        vocabulary: How many tokens there are (V).
        hidden: Width inside each block's feed-forward part (h); None for 4 times `width`.
        dropout: Probability of dropping, behind the embedding and in each block.

    Returns:
        A model from tokens (rows, tokens), whole numbers below `vocabulary`, to logits (rows,
        tokens, vocabulary); those at a token depend on it and on earlier ones.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: An argument has a value that is not allowed.
    """
    num_blocks = require_count("num_blocks", num_blocks)
    width = require_count("width", width)
    hidden = 4 * width if hidden is None else require_count("hidden", hidden)
    vocabulary = require_count("vocabulary", vocabulary)
    _check_heads(width, require_count("num_heads", num_heads))
    _check_dropout(dropout)
    blocks = (Block(width, num_heads, hidden, dropout) for _ in range(num_blocks))
    embedding = TokenEmbedding(vocabulary, width, dropout)
    return nn.Sequential(embedding, *blocks, Projection(width, vocabulary))


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """The mean cross-entropy of the tokens that were to be predicted.

    Args:
        logits: What the model gives, (rows, tokens, vocabulary).
        tokens: The token behind each, (rows, tokens).
    """
    return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class TokenEmbedding(nn.Module):
    """Tokens to vectors, with the sinusoids of their positions added.

    The sinusoids are computed anew each time: nothing is held for them, and any length will do.
    """

    def __init__(self, vocabulary: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(dropout)
        self.scale = math.sqrt(width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the vectors so that, scaled, they are as large as the sinusoids."""
        nn.init.normal_(self.tokens.weight, std=1 / self.scale)

    def forward(self, tokens: Tensor) -> Tensor:
        """From (rows, tokens) to (rows, tokens, width)."""
        vectors = self.tokens(tokens) * self.scale
        output: Tensor = self.dropout(vectors + sinusoids(vectors))
        return output


class Block(nn.Module):
    """Self-attention and a feed-forward part, each with a residual around it."""

    def __init__(self, width: int, num_heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, input: Tensor) -> Tensor:
        """From (rows, tokens, width) to the same shape."""
        middle = input + self.dropout(self.attend(self.attention_norm(input)))
        output: Tensor = middle + self.dropout(self.feed_forward(self.feed_forward_norm(middle)))
        return output

    def attend(self, input: Tensor) -> Tensor:
        """What each token takes from itself and earlier ones."""
        split = self.queries_keys_values(input).unflatten(-1, (3, self.num_heads, -1))
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        dropout = self.attention_dropout if self.training else 0.0
        taken = functional.scaled_dot_product_attention(
            queries, keys, values, dropout_p=dropout, is_causal=True
        )
        output: Tensor = self.attended(taken.transpose(1, 2).flatten(2))
        return output


class Projection(nn.Module):
    """Vectors to logits, after a normalisation without parameters."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)  # the weights behind it scale
        self.logits = nn.Linear(width, vocabulary)

    def forward(self, input: Tensor) -> Tensor:
        """From (rows, tokens, width) to (rows, tokens, vocabulary)."""
        output: Tensor = self.logits(self.norm(input))
        return output


def sinusoids(vectors: Tensor) -> Tensor:
    """Sines and cosines of the positions, (tokens, width), for vectors (rows, tokens, width).

    Their wavelengths go from 2π to 20000π, as in "Attention is all you need".
    """
    num_tokens, width = vectors.shape[-2:]
    positions = torch.arange(num_tokens, device=vectors.device, dtype=torch.float32)
    channels = torch.arange(width, device=vectors.device, dtype=torch.float32)
    pairs = 2 * torch.div(channels, 2, rounding_mode="floor")
    angles = positions[:, None] * torch.exp(pairs * (-math.log(10000.0) / width))
    return torch.where(channels % 2 == 0, angles.sin(), angles.cos()).to(vectors.dtype)


def _check_heads(width: int, num_heads: int) -> None:
    if width % num_heads:
        raise ValueError(
            f"width is {width} and num_heads is {num_heads}. Let width be a multiple of num_heads."
        )


def _check_dropout(dropout: object) -> None:
    if not isinstance(dropout, int | float) or isinstance(dropout, bool):
        raise TypeError(f"dropout is {dropout!r}. Give a number from 0 up to, not including, 1.")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is {dropout!r}. Give a number from 0 up to, not including, 1.")
