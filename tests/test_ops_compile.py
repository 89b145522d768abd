"""torch.compile (fullgraph) of every op and overload, forward and backward, and torch.export."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_ops import FlagPrecision
from torch import Tensor

import torch_gemm
from torch_gemm import ops

tgemm = torch.ops.tgemm
BACKENDS = ("aot_eager", "inductor")


def randn(*sizes: int, grad: bool = False) -> Tensor:
    return torch.randn(sizes).requires_grad_(grad)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    return tgemm.matmul(a * 2, b) + 1


def linear(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return tgemm.linear(x.relu(), weight, bias, residual, activation="gelu").sin()


def linear_relu(x: Tensor, weight: Tensor) -> Tensor:
    return tgemm.linear(x, weight, activation="relu", out_dtype=torch.bfloat16).float()


def linear_preact(x: Tensor, weight: Tensor) -> Tensor:
    out, preact = tgemm._linear_preact(x, weight, activation="silu")
    return out + preact


def linear_glu(x: Tensor, gate: Tensor, up: Tensor, gate_bias: Tensor, up_bias: Tensor) -> Tensor:
    return tgemm.linear_glu(x.relu(), gate, up, gate_bias, up_bias, activation="gelu").sin()


def linear_glu_preact(x: Tensor, gate_weight: Tensor, up_weight: Tensor) -> Tensor:
    out, gate, up = tgemm._linear_glu_preact(x, gate_weight, up_weight)
    return out + gate + 2 * up


def addmm(addend: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return tgemm.addmm(addend, a, b, beta=0.5, alpha=2.0) * 3


def matmul_out(a: Tensor, b: Tensor) -> Tensor:
    out = a.new_empty(a.shape[0], b.shape[1])
    tgemm.matmul.out(a, b, out=out)
    return out + 1


def linear_out(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    total = residual * 2
    tgemm.linear.out(x, weight, bias, total, activation="silu", out=total)
    return total


def linear_glu_out(x: Tensor, gate_weight: Tensor, up_weight: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], gate_weight.shape[0])
    tgemm.linear_glu.out(x, gate_weight, up_weight, out=out)
    return out + 1


def addmm_out(addend: Tensor, a: Tensor, b: Tensor) -> Tensor:
    out = torch.empty(addend.shape)
    tgemm.addmm.out(addend, a, b, alpha=2.0, out=out)
    return out


def wrapper_matmul(a: Tensor, b: Tensor) -> Tensor:
    return torch_gemm.matmul(a, b, out_dtype=torch.float16).float()


def wrapper_linear(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return torch_gemm.linear(x, weight, bias, residual, activation="gelu_tanh")


def wrapper_linear_glu(x: Tensor, packed: Tensor) -> Tensor:
    gate_weight, up_weight = packed.chunk(2)
    return torch_gemm.linear_glu(x, gate_weight, up_weight)


def wrapper_addmm(addend: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch_gemm.addmm(addend, a, b, alpha=2.0)


def wrapper_out(a: Tensor, b: Tensor) -> Tensor:
    return torch_gemm.matmul(a, b, out=a.new_empty(a.shape[0], b.shape[1]))


FUNCTIONS: dict[Callable[..., Tensor], tuple[tuple[int, ...], ...]] = {
    matmul: ((3, 5), (5, 4)),
    linear: ((2, 3, 5), (4, 5), (4,), (3, 4)),
    linear_relu: ((3, 5), (4, 5)),
    linear_preact: ((3, 5), (4, 5)),
    linear_glu: ((2, 3, 5), (4, 5), (4, 5), (4,), (4,)),
    linear_glu_preact: ((3, 5), (4, 5), (4, 5)),
    addmm: ((4,), (3, 5), (5, 4)),
    wrapper_matmul: ((2, 3, 5), (5, 4)),
    wrapper_linear: ((3, 5), (4, 5), (4,), (3, 4)),
    wrapper_linear_glu: ((2, 3, 5), (8, 5)),
    wrapper_addmm: ((3, 4), (3, 5), (5, 4)),
}
OUT_FUNCTIONS: dict[Callable[..., Tensor], tuple[tuple[int, ...], ...]] = {
    matmul_out: ((3, 5), (5, 4)),
    linear_out: ((3, 5), (4, 5), (4,), (3, 4)),
    linear_glu_out: ((3, 5), (4, 5), (4, 5)),
    addmm_out: ((3, 4), (3, 5), (5, 4)),
    wrapper_out: ((3, 5), (5, 4)),
}


# Inductor computes a chain of casts through a 16-bit dtype in FP32 throughout, so that gradients differ
# by a rounding to that dtype.
TOLERANCES = {
    linear_relu: {"rtol": 2.0**-7, "atol": 2.0**-7},
    wrapper_matmul: {"rtol": 2.0**-10, "atol": 2.0**-10},
}


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def named(function: Callable[..., Tensor]) -> str:
    return function.__name__


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", [*FUNCTIONS, *OUT_FUNCTIONS], ids=named)
def test_inference(function, backend):
    inputs = [randn(*shape) for shape in (FUNCTIONS | OUT_FUNCTIONS)[function]]
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    expected = function(*inputs)
    torch.testing.assert_close(compiled(*inputs), expected)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(*inputs), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", FUNCTIONS, ids=named)
def test_training(function, backend):
    shapes = FUNCTIONS[function]
    inputs = [randn(*shape, grad=True) for shape in shapes]
    out = function(*inputs)
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, inputs, grad)
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    result = compiled(*inputs)
    torch.testing.assert_close(result, out)
    gradients = torch.autograd.grad(result, inputs, grad)
    torch.testing.assert_close(gradients, expected, **TOLERANCES.get(function, {}))


def test_dynamic_shapes_compile_once():
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(linear, fullgraph=True, backend=backend, dynamic=True)
    weight, bias = randn(4, 5), randn(4)
    for batch, rows in ((2, 3), (7, 9), (5, 6)):
        inputs = (randn(batch, rows, 5), weight, bias, randn(rows, 4))
        torch.testing.assert_close(compiled(*inputs), linear(*inputs))
    assert len(graphs) == 1


@pytest.mark.parametrize("how", ["dynamic", "mark_dynamic"])
def test_any_number_of_rows_takes_few_graphs(how):
    """One graph for all, at most one more for a single row, and one for none."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    layer = torch_gemm.nn.Linear(5, 4, activation="gelu").requires_grad_(False)

    def function(x: Tensor) -> Tensor:
        return torch_gemm.matmul(layer(x), layer.weight) + x

    compiled = torch.compile(
        function, fullgraph=True, backend=backend, dynamic=True if how == "dynamic" else None
    )
    for rows in (17, 1, 2, 3, 128, 4096, 0):
        x = randn(rows, 5)
        if how == "mark_dynamic" and rows > 1:  # torch refuses to mark a size of 0 or 1
            torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), function(x))
    assert len(graphs) <= 3


def test_a_change_of_the_precision_flags_recompiles():
    """The wrappers take the flags as a constant; dynamo's own guards must notice when they change."""

    def uses_tf32(x: Tensor) -> Tensor:
        return x + (1 if ops._cuda_fp32_precision() == "tf32" else 0)

    compiled = torch.compile(uses_tf32, fullgraph=True, backend="eager")
    with FlagPrecision():
        for precision, expected in (("ieee", 0), ("tf32", 1), ("ieee", 0)):
            torch.backends.cuda.matmul.fp32_precision = precision
            assert compiled(torch.zeros(())).item() == expected


def test_inductor_keeps_the_strides_it_promised():
    """What follows the op in the graph reads it with the fake implementation's strides."""

    def function(a: Tensor, b: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        out = tgemm.matmul(a.mT, b)
        return out.view(-1) * 2, out.stride()

    a, b = randn(6, 5, 3), randn(5, 4)
    flat, stride = torch.compile(function, fullgraph=True)(a, b)
    assert stride == (12, 4, 1)
    torch.testing.assert_close(flat, (a.mT @ b).reshape(-1) * 2)


def test_autocast_inside_a_compiled_function():
    def function(x: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return tgemm.linear(x, weight, activation="relu")

    x, weight = randn(3, 5), randn(4, 5)
    out = torch.compile(function, fullgraph=True, backend="aot_eager")(x, weight)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, function(x, weight))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch_gemm.nn.Linear(5, 7, activation="gelu")
        self.gate, self.up = (torch.nn.Parameter(torch.randn(6, 7)) for _ in range(2))
        self.second = torch_gemm.nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(torch_gemm.linear_glu(self.first(x), self.gate, self.up))
        return torch_gemm.matmul(hidden, hidden.mT)


@pytest.mark.parametrize("dynamic", [False, True])
def test_export(dynamic):
    model = Model().eval()
    rows = {"x": {0: torch.export.Dim.DYNAMIC}} if dynamic else None
    program = torch.export.export(model, (randn(3, 5),), dynamic_shapes=rows)
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    used = {"tgemm.linear.default", "tgemm.linear_glu.default", "tgemm.matmul.default"}
    assert used <= targets
    for count in (3, 6) if dynamic else (3,):
        x = randn(count, 5)
        torch.testing.assert_close(program.module()(x), model(x))
    lowered = program.run_decompositions()
    torch.testing.assert_close(lowered.module()(randn(3, 5)).shape, torch.Size([3, 3]))


def test_exported_program_survives_a_file(tmp_path):
    model, x = Model().eval(), randn(3, 5)
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    torch.testing.assert_close(loaded.module()(x), model(x))


class Stock(torch.nn.Module):
    """No tgemm op in sight: Inductor's pass puts them in."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(5, 7, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


IN_ANOTHER_PROCESS = """
import sys, torch, torch_gemm
loaded = torch_gemm.load_package(sys.argv[1])
for x, expected in torch.load(sys.argv[2]):
    torch.testing.assert_close(loaded(x), expected)
    print(tuple(x.shape))
"""


WITHOUT_TORCH_GEMM = """
import sys, torch
torch._inductor.aoti_load_package(sys.argv[1])
"""


def skip_if_torch_alone_crashes(tmp_path) -> None:
    """Where a process dies of a package, torch's own loader may be why: some builds of it do, in std::regex."""
    program = torch.export.export(torch.nn.Linear(2, 2).eval(), (randn(1, 2),))
    path = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "torch_alone.pt2")
    )
    result = subprocess.run([sys.executable, "-c", WITHOUT_TORCH_GEMM, path], check=False)
    if result.returncode < 0:
        pytest.skip(
            f"torch {torch.__version__} dies of signal {-result.returncode} on this machine when it "
            "loads a package, without torch_gemm too"
        )


def test_aot_inductor(tmp_path):
    """A package with a dynamic batch, loaded where nothing but torch_gemm has been imported."""
    model = torch.nn.Sequential(Stock(), Model()).eval().requires_grad_(False)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (randn(3, 5),), dynamic_shapes=({0: batch},))
    path = torch._inductor.aoti_compile_and_package(
        program,
        package_path=str(tmp_path / "model.pt2"),
        inductor_configs=torch_gemm.inductor.options(),
    )
    with zipfile.ZipFile(path) as package:
        text = b"".join(package.read(name) for name in package.namelist() if ".json" in name)
    # The model's own, and the one that the pass made of its other half.
    assert text.count(b"tgemm::linear_glu") == 2
    inputs = [randn(count, 5) for count in (3, 8)]
    torch.save([(x, model(x)) for x in inputs], tmp_path / "inputs.pt")
    result = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS, path, str(tmp_path / "inputs.pt")],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode < 0:
        skip_if_torch_alone_crashes(tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["(3, 5)", "(8, 5)"]


def test_what_is_no_package(tmp_path):
    with pytest.raises(TypeError, match="load_package expects a path, and got a int"):
        torch_gemm.load_package(3)
    with pytest.raises(FileNotFoundError, match=r"load_package: there is no .*nothing.pt2"):
        torch_gemm.load_package(tmp_path / "nothing.pt2")
    text = tmp_path / "text.pt2"
    text.write_text("words")
    with pytest.raises(RuntimeError, match=r"is not a package of torch._inductor"):
        torch_gemm.load_package(text)
    torch.export.save(torch.export.export(Model().eval(), (randn(3, 5),)), tmp_path / "program.pt2")
    with pytest.raises(
        RuntimeError, match=r"a torch.export program, which has to be compiled first"
    ):
        torch_gemm.load_package(tmp_path / "program.pt2")
    with zipfile.ZipFile(tmp_path / "broken.pt2", "w") as archive:
        archive.writestr("data/aotinductor/model/model.so", "words")
    with pytest.raises(RuntimeError, match=r"load_package: torch cannot load .*broken.pt2: "):
        torch_gemm.load_package(tmp_path / "broken.pt2")
