"""What is measured: suites of GEMMs, as data."""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = ("fp16", "bf16", "fp32", "tf32")


@dataclass(frozen=True)
class Shape:
    """``x (M, K) @ weight (N, K).T``, the layout of nn.Linear.

    `dtype` is one of DTYPES; "tf32" is FP32 operands with TF32 allowed, for torch and for tgemm.
    `force` are kernels to measure besides the automatic choice.
    """

    m: int
    n: int
    k: int
    dtype: str
    force: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k} {self.dtype}"

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Of the operands and the output."""
        size = 2 if self.dtype in ("fp16", "bf16") else 4
        return size * (self.m * self.k + self.n * self.k + self.m * self.n)


LLAMA_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # N and K

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
    # Linear layers of Llama-3.1 8B (and two of 70B), squares, and of vision and sentence models.
    "sm90": tuple(
        Shape(m, n, k, "bf16")
        for m, n, k in (
            *((m, n, k) for m in (128, 256, 512, 2048) for n, k in LLAMA_8B),
            *((m, 8192, 8192) for m in (128, 256, 8192)),
            (4096, 4096, 4096),
            (2048, 2048, 2048),
            (1024, 1024, 1024),
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
    ),
}


def parse_shape(text: str, dtype: str) -> Shape:
    """The shape that a text like "4096x6144x4096" (MxNxK) names.

    Raises:
        ValueError: if the text is of another form or a size is not positive.
    """
    try:
        m, n, k = (int(size) for size in text.split("x"))
    except ValueError:
        raise ValueError(f"{text!r} is not a shape like 4096x6144x4096 (MxNxK)") from None
    if min(m, n, k) < 1:
        raise ValueError(f"{text!r} has a size below 1")
    return Shape(m, n, k, dtype)
