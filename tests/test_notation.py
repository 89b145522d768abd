"""How sizes and dtypes are written."""

from __future__ import annotations

import pytest
import torch

from torch_gemm.notation import MAX_SIZE, dtype_of, plain, sizes_of


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ("2048x4096x14336", (2048, 4096, 14336)),
        ("8x48x64x80", (8, 48, 64, 80)),
        ("8x(48x64x80)", (8, 48, 64, 80)),
        ("48X64*80", (48, 64, 80)),
        (" 48 x 64, 80 ", (48, 64, 80)),
        ((48, 64, 80), (48, 64, 80)),
        ([8, 48, 64, 80], (8, 48, 64, 80)),
        (torch.Size((1, 2, 3)), (1, 2, 3)),
        ((torch.tensor(3), True, MAX_SIZE), (3, 1, MAX_SIZE)),
    ],
)
def test_sizes(shape, sizes):
    assert sizes_of(shape) == sizes


@pytest.mark.parametrize(
    "shape",
    [
        *(
            "",
            "64x64",
            "1x2x3x4x5",
            "axbxc",
            "64x64x-1",
            "1.5x2x3",
            "1xx2x3",
            "8x(1x2x3",
            "8x1x2x3)",
        ),
        *("(1x2x3)", "1x2x(3x4)", "1_0x2x3", "٣x2x3", "1x2x3\n4", 3, None, (1, 2), (1.5, 2, 3)),
        *((-1, 2, 3), ("1", "2", "3"), {"a": 1}, torch.ones(3)),
    ],
)
def test_no_sizes(shape):
    with pytest.raises(ValueError, match="is no shape; write MxNxK"):
        sizes_of(shape)


def test_sizes_out_of_bounds():
    assert sizes_of("0x2x3", least=0) == (0, 2, 3)
    with pytest.raises(ValueError, match="'0x2x3' has a size below 1"):
        sizes_of("0x2x3")
    with pytest.raises(ValueError, match=r"has a size above 2\^40"):
        sizes_of((1, 2, MAX_SIZE + 1))


def test_dtypes():
    for name in ("bf16", "bfloat16", torch.bfloat16):
        assert dtype_of(name) is torch.bfloat16
    assert dtype_of(torch.float64) is torch.float64
    with pytest.raises(ValueError, match="dtype is 'float64', and must be fp16, bf16 or fp32"):
        dtype_of("float64")
    with pytest.raises(TypeError, match=r"a name or a torch\.dtype, and is a int"):
        dtype_of(16)
    assert [plain(one) for one in (torch.float16, torch.sparse_csr)] == ["float16", "sparse_csr"]
