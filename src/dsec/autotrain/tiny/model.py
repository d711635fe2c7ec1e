"""A decoder of about 10^5 parameters: rotary positions, pre-norm, a cache of keys and values for one token at a time."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from dsec.autotrain.tiny.text import ALPHABET

LONGEST = 128  # tokens of a conversation
_ROTATION = 1000.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model."""

    width: int = 56
    layers: int = 3
    heads: int = 4


class Cache:
    """Keys and values of `rows` conversations."""

    def __init__(self, shape: Shape, rows: int, length: int, device: torch.device) -> None:
        size = (rows, shape.heads, length, shape.width // shape.heads)
        self.layers = [(torch.zeros(size, device=device), torch.zeros(size, device=device)) for _ in range(shape.layers)]

    def keep(self, rows: Tensor) -> None:
        """Only these conversations go on."""
        self.layers = [(keys[rows], values[rows]) for keys, values in self.layers]


class Model(nn.Module):
    """Scores of the next token, `[rows, tokens, alphabet]`."""

    def __init__(self, shape: Shape = Shape()) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(len(ALPHABET), shape.width)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, len(ALPHABET), bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.rotation: Tensor
        self.register_buffer("rotation", _rotation(shape.width // shape.heads), persistent=False)

    def forward(self, tokens: Tensor, cache: Cache | None = None, at: int = 0) -> Tensor:
        """With a cache `tokens` are those from position `at` on: more than one only at 0."""
        rotation = self.rotation[:, at : at + tokens.shape[1]]
        hidden = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            hidden = block(hidden, rotation, None if cache is None else cache.layers[i], at)
        return self.head(self.norm(hidden))

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.head.weight.device

    def save(self, path: Path) -> None:
        """Weights as safetensors; the shape stands in the metadata."""
        told = {"shape": json.dumps(asdict(self.shape))}  # one entry: of several the order would differ from file to file
        save_file({name: value.contiguous() for name, value in self.state_dict().items()}, path, metadata=told)

    @classmethod
    def load(cls, path: Path, device: str = "cpu") -> Model:
        """A model that `save` wrote. ValueError when it is none."""
        from safetensors import safe_open

        with safe_open(path, "pt") as opened:
            metadata = opened.metadata() or {}
        try:
            model = cls(Shape(**json.loads(metadata["shape"])))
            model.load_state_dict(load_file(path))
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{path}: not a tiny model: {error}") from error
        return model.to(device)


class _Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, self.heads = shape.width, shape.heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        for layer in (self.qkv, self.up):
            nn.init.normal_(layer.weight, std=1 / math.sqrt(width))
        nn.init.normal_(self.out.weight, std=0.3 / math.sqrt(width))
        nn.init.normal_(self.down.weight, std=0.3 / math.sqrt(4 * width))

    def forward(self, hidden: Tensor, rotation: Tensor, cache: tuple[Tensor, Tensor] | None, at: int) -> Tensor:
        rows, length, width = hidden.shape
        packed = self.qkv(self.before_attention(hidden)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        query, key = _rotated(query, rotation), _rotated(key, rotation)
        if cache is not None:
            cache[0][:, :, at : at + length], cache[1][:, :, at : at + length] = key, value
        if cache is not None and length == 1:
            mixed = F.scaled_dot_product_attention(query, cache[0][:, :, : at + 1], cache[1][:, :, : at + 1])
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return hidden + self.down(F.gelu(self.up(self.before_mlp(hidden))))


def _rotation(size: int) -> Tensor:
    angles = torch.arange(LONGEST).float()[:, None] / _ROTATION ** (torch.arange(0, size, 2).float() / size)
    return torch.stack((angles.cos(), angles.sin()))


def _rotated(x: Tensor, rotation: Tensor) -> Tensor:
    cos, sin = rotation
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
