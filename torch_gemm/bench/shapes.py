"""What is measured: suites of GEMMs, as data."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch_gemm import notation

DTYPES = ("fp16", "bf16", "fp32", "tf32", "3xtf32")
EPILOGUES = ("", "bias", "gelu", "silu", "residual", "swiglu")
LAYOUTS = ("nt", "nn", "tn", "tt")
# What tgemm can be measured against besides torch as it is.
LT, COMPILED = "cublasLt, best of 8", "torch.compile, max-autotune"
QUACK = "QuACK, autotuned"
AGAINST = {"lt": LT, "compile": COMPILED, "quack": QUACK}


@dataclass(frozen=True)
class Shape:
    """``x (M, K) @ weight (N, K).T``, and what follows it; `batch` of them at once if it is more than 1.

    `dtype` is one of DTYPES; "tf32" is FP32 operands with TF32 allowed, for torch and for tgemm, "3xtf32"
    FP32 operands that tgemm multiplies with this precision and torch in true FP32.
    `force` are kernels to measure besides the automatic choice.
    `epilogue` is one of EPILOGUES: "gelu" adds a bias first, "swiglu" multiplies by a packed weight (2N, K)
    and gives ``silu(gate) * up``.
    `layout` is one of LAYOUTS, a letter each for x and for weight.T: "n" lies row-major in memory, "t" is
    the transpose of what does. "nt" is the layout of nn.Linear.
    `offset` is where x and weight begin in their storage, and `padding` what lies between two of their rows
    (columns, where they are transposes), in elements.
    With `heads`, x and weight of a batch lie as projections leave them for attention, (batch / heads, M, heads, K)
    in memory: two batch dimensions that cannot be merged into one. `group` matrices x share one weight: all
    of a batch, or, with heads, as in grouped-query attention.
    """

    m: int
    n: int
    k: int
    dtype: str
    force: tuple[str, ...] = ()
    epilogue: str = ""
    layout: str = "nt"
    batch: int = 1
    offset: int = 0
    padding: int = 0
    heads: int = 0
    group: int = 1

    def __str__(self) -> str:
        sizes = f"{self.m}x{self.n}x{self.k}"
        if self.batch > 1:
            sizes = f"{self.batch}x({sizes})"
        layout = "" if self.layout == "nt" else self.layout
        words = (sizes, self.dtype, layout, self.epilogue, self.placement)
        return " ".join(word for word in words if word)

    @property
    def placement(self) -> str:
        """How x and weight lie in memory, if not from the start of their storage, without gaps, one after the other."""
        shared = "one weight" if self.group == self.batch else f"{self.group} a weight"
        words = (
            (f"offset {self.offset}", self.offset),
            (f"stride+{self.padding}", self.padding),
            (f"{self.heads} heads", self.heads),
            (shared, self.group > 1),
        )
        return " ".join(word for word, given in words if given)

    @property
    def weight_rows(self) -> int:
        """N, or 2N where gate and up are packed into one weight."""
        return 2 * self.n if self.epilogue == "swiglu" else self.n

    @property
    def flops(self) -> float:
        """Multiplications and additions of the product."""
        return 2.0 * self.batch * self.m * self.weight_rows * self.k

    @property
    def bytes(self) -> int:
        """Of the operands and the output."""
        size = 2 if self.dtype in ("fp16", "bf16") else 4
        elements = self.batch * (self.m * self.k + self.m * self.n)
        elements += self.batch // self.group * self.weight_rows * self.k
        if self.epilogue in ("bias", "gelu"):
            elements += self.n
        if self.epilogue == "residual":
            elements += self.m * self.n
        return size * elements


LLAMA_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # N and K


def _bf16(*sizes: tuple[int, int, int]) -> tuple[Shape, ...]:
    return tuple(Shape(m, n, k, "bf16") for m, n, k in sizes)


# Linear layers of Llama-3.1 8B and two of 70B at prefill.
LLM = _bf16(
    *((m, n, k) for m in (128, 256, 512, 2048) for n, k in LLAMA_8B),
    *((m, 8192, 8192) for m in (128, 256)),
)
SQUARES = _bf16(*((size, size, size) for size in (8192, 4096, 2048, 1024)))
# Of vision and sentence models.
VISION = _bf16(
    (4096, 10240, 1280),
    (4608, 12288, 3072),
    (6304, 2304, 768),
    (6304, 3072, 768),
    (6304, 768, 3072),
    (2916, 4304, 1152),
    (2916, 1152, 4304),
    (2048, 1536, 384),
    (2048, 384, 1536),
    (4096, 768, 768),
)

SUITES: dict[str, tuple[Shape, ...]] = {
    # The two kernels that run everything, where they have to prove themselves.
    "foundation": (
        Shape(4096, 4096, 4096, "fp16", ("mma_sync",)),
        Shape(4096, 4096, 4096, "bf16", ("mma_sync",)),
        Shape(2048, 6144, 4096, "fp16", ("mma_sync",)),
        Shape(2048, 6144, 4096, "bf16", ("mma_sync",)),
        Shape(1024, 1024, 1024, "fp32", ("simt",)),
        Shape(4096, 4096, 4096, "fp32", ("simt",)),
        Shape(2048, 4096, 4096, "fp32", ("simt",)),
    ),
    "sm90": LLM + SQUARES + VISION,
    "llm": LLM,
    "vision": VISION,
    # The same layers where few rows leave nothing to do but read the weight, and Llama's head.
    "decode": (
        *(Shape(m, n, k, "bf16") for n, k in LLAMA_8B for m in (1, 2, 4, 8, 16, 32, 64)),
        *(Shape(m, 128256, 4096, "bf16") for m in (1, 16)),
    ),
    # What an epilogue costs over the plain product, and SwiGLU over one product of 2N columns.
    "fused": (
        *(
            Shape(m, n, k, "bf16", epilogue=epilogue)
            for m, n, k in ((2048, 14336, 4096), (6304, 3072, 768), (2048, 1536, 384))
            for epilogue in ("", "bias", "gelu", "silu", "residual")
        ),
        Shape(2048, 28672, 4096, "bf16"),
        Shape(2048, 14336, 4096, "bf16", epilogue="swiglu"),
        Shape(512, 14336, 4096, "bf16", epilogue="swiglu"),
        Shape(4096, 3072, 1024, "bf16", epilogue="swiglu"),
    ),
    # sm90 beyond BF16 as nn.Linear has it: TF32, other layouts, sizes and strides that TMA cannot read.
    "other": (
        Shape(4096, 4096, 4096, "tf32"),
        Shape(2048, 6144, 4096, "tf32"),
        Shape(2048, 4096, 4096, "tf32", layout="nn"),
        *(Shape(2048, 6144, 4096, "bf16", layout=layout) for layout in ("nn", "tn", "tt")),
        Shape(100, 4096, 4096, "bf16", layout="tt"),  # x has a leading stride of 100
        Shape(1024, 4096, 4095, "bf16"),
        Shape(1021, 2039, 4093, "bf16"),
        Shape(1024, 4097, 4096, "bf16", layout="nn"),
    ),
    # Few tiles and a long K, which only its division keeps the SMs busy with.
    "large_k": _bf16((64, 64, 65536), (128, 512, 32768), (256, 256, 16384), (768, 768, 50257)),
    # Sizes, strides and offsets that are no multiple of 16 bytes, each after its aligned neighbour.
    "odd": (
        Shape(1024, 4096, 4096, "bf16"),
        Shape(1024, 4096, 4095, "bf16"),
        Shape(1024, 4096, 4096, "bf16", offset=1),
        Shape(1024, 4096, 4096, "bf16", padding=1),
        Shape(1024, 4104, 4096, "bf16"),
        Shape(1024, 4097, 4096, "bf16"),
        Shape(512, 50264, 768, "bf16"),  # GPT-2's head
        Shape(512, 50257, 768, "bf16"),
        Shape(64, 51872, 1280, "bf16"),  # Whisper's
        Shape(64, 51865, 1280, "bf16"),
        Shape(1024, 2040, 4096, "bf16"),
        Shape(1021, 2039, 4093, "bf16"),
        *(
            Shape(m, n, k, "bf16")
            for m in (1, 16)
            for n, k in ((4096, 4096), (4096, 4095), (4097, 4096))
        ),
    ),
    # torch.bmm, both operands row-major, and as in attention: queries by keys, scores by values.
    "batch": (
        Shape(128, 128, 64, "bf16", layout="nn", batch=32),
        Shape(64, 64, 64, "bf16", layout="nn", batch=512),
        Shape(512, 512, 64, "bf16", layout="nn", batch=128),
        Shape(512, 512, 64, "bf16", layout="nt", batch=128),
        Shape(512, 64, 512, "bf16", layout="nn", batch=128),
        Shape(1, 4096, 4096, "bf16", layout="nn", batch=16),
        Shape(1, 4096, 4096, "bf16", layout="nt", batch=16),
        Shape(1024, 1024, 1024, "bf16", layout="nn", batch=64),
        Shape(32, 32, 32, "bf16", layout="nn", batch=1024),
        Shape(8, 8, 8, "bf16", layout="nn", batch=70000),
        # A batch by one weight; attention in four dimensions, queries by keys and scores by values; four
        # heads of queries to one of keys, which torch copies.
        Shape(128, 1024, 1024, "bf16", batch=32, group=32),
        Shape(512, 512, 64, "bf16", batch=128, heads=16),
        Shape(512, 64, 512, "bf16", layout="nn", batch=128, heads=16),
        Shape(512, 512, 128, "bf16", batch=64, heads=32, group=4),
        Shape(1, 2048, 128, "bf16", batch=256, heads=32, group=4),
    ),
    # A few of each kind, for rivals that take up to a minute to compile and tune for every shape.
    "rivals": _bf16(
        (8, 4096, 4096),
        (128, 6144, 4096),
        (256, 28672, 4096),
        (512, 4096, 4096),
        (2048, 4096, 14336),
        (4096, 4096, 4096),
        (6304, 3072, 768),
        (2048, 1536, 384),
        (1024, 4096, 4095),
    ),
    # FP32 beside SGEMM: true FP32 on CUDA cores, and as exact on Tensor Cores.
    "fp32": tuple(
        Shape(m, n, k, dtype)
        for dtype in ("fp32", "3xtf32")
        for m, n, k in (
            (1024, 1024, 1024),
            (2048, 4096, 4096),
            (4096, 4096, 4096),
            (1021, 2039, 4093),
        )
    ),
}


# By another name.
SUITES["epilogue"] = SUITES["fused"]


def shape_of(row: dict[str, Any]) -> Shape:
    """What a row of a stored result measured; what it does not say has its default."""
    known = {field.name: row[field.name] for field in fields(Shape) if field.name in row}
    return Shape(**known | {"force": tuple(row.get("force", ()))})


def parse_shape(text: str, dtype: str) -> Shape:
    """The shape that a text like "4096x6144x4096" (MxNxK) or "32x128x128x64" (32 of them) names.

    Raises:
        ValueError: if the text is of another form or a size is not positive.
    """
    *batch, m, n, k = notation.sizes_of(text)
    return Shape(m, n, k, dtype, batch=batch[0] if batch else 1)
