"""Model architecture as one frozen, validated dataclass."""

import math
from dataclasses import dataclass
from typing import Literal

ComputeDtype = Literal["float32", "bfloat16"]
Remat = Literal["none", "dots", "full"]
AttentionImplementation = Literal["xla", "cudnn", "splash"]


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3 frequency scaling (``rope_type: llama3`` in a Hugging Face config)."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192

    def __post_init__(self) -> None:
        if not self.factor >= 1.0:
            raise ValueError(f"RopeScaling.factor must be at least 1, got {self.factor}")
        if not 0.0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                "RopeScaling.low_freq_factor must be positive and below high_freq_factor, got "
                f"{self.low_freq_factor} and {self.high_freq_factor}"
            )
        if self.original_max_len < 1:
            raise ValueError(
                f"RopeScaling.original_max_len must be positive, got {self.original_max_len}"
            )


@dataclass(frozen=True)
class ModelConfig:
    """A dense decoder: Qwen3, Qwen2.5, Llama 3.x or a tiny byte-level model.

    Qwen3 sets ``qk_norm``, Qwen2.5 ``qkv_bias``, Llama 3.x ``rope_scaling``. Parameters are
    always float32; ``compute_dtype`` is what activations and matrix products use.
    ``remat`` says what the backward pass recomputes within each layer: nothing
    (``"none"``), all but matrix products (``"dots"``), or everything (``"full"``).
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    max_len: int = 4096
    rope_theta: float = 1e4
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    qk_norm: bool = False
    qkv_bias: bool = False
    tie_embeddings: bool = True
    compute_dtype: ComputeDtype = "float32"
    remat: Remat = "none"
    attention: AttentionImplementation = "xla"

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "mlp_size",
            "max_len",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"ModelConfig.{name} must be a positive integer, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                "ModelConfig.num_heads must be a multiple of num_kv_heads, got "
                f"{self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"ModelConfig.head_dim must be even (RoPE turns pairs), got {self.head_dim}"
            )
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"ModelConfig.{name} must be positive and finite, got {value!r}")
        for name, choices in (
            ("compute_dtype", ("float32", "bfloat16")),
            ("remat", ("none", "dots", "full")),
            ("attention", ("xla", "cudnn", "splash")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"ModelConfig.{name} must be one of {', '.join(choices)}, "
                    f"got {getattr(self, name)!r}"
                )

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_params(self) -> int:
        """Number of parameters; a tied embedding counts once."""
        d, q, kv = self.hidden_size, self.query_size, self.kv_size
        layer = 2 * d + d * (q + 2 * kv) + q * d + 3 * d * self.mlp_size
        layer += 2 * self.head_dim if self.qk_norm else 0
        layer += q + 2 * kv if self.qkv_bias else 0
        tables = self.vocab_size * d * (1 if self.tie_embeddings else 2)
        return tables + self.num_layers * layer + d
