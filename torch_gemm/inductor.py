"""torch.compile for tgemm: a pass that turns the products of an unmodified model into fused tgemm ops.

    compiled = torch.compile(model, options=torch_gemm.inductor.options())
    compiled(x)
    print(torch_gemm.inductor.reports()[-1])

The pass runs on the graph between autograd and Inductor's own passes, where every matmul, linear and einsum
has become mm, addmm or bmm, and where activations are written out in elementary operations. What a kernel
can compute along with its product (bias, activation, a residual sum, the gate of a GLU) is taken from the
graph; the rest stays Inductor's. Where Inductor tunes (max_autotune), a product with nothing to fuse is
one of its contests, in which tgemm is a candidate.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from torch_gemm import ops

_aten = torch.ops.aten
_tgemm = torch.ops.tgemm

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_DEVICES = ("cpu", "cuda")
_RESHAPES = (_aten.reshape.default, _aten.view.default, _aten._unsafe_view.default)
_CAST = torch.ops.prims.convert_element_type.default
_PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default)
# Multiply-adds below which a product is short if there is little to fuse (30 us on an H200), and if there is more
# (6 us); and rows from which on torch's kernels are as good at it.
_SHORT, _VERY_SHORT, _MANY_ROWS = 10**10, 2 * 10**9, 64
_HOOK = "post_grad_custom_pre_pass"
_CANDIDATES = "external_matmul"


class Matched(NamedTuple):
    """A product that runs on tgemm."""

    node: str  # in Inductor's graph: "addmm_3"
    op: str  # of torch.ops.tgemm
    fused: tuple[str, ...]  # what else the kernel computes


class Missed(NamedTuple):
    """A product, or a part of what follows it, that was left to Inductor."""

    node: str
    reason: str


class Tuned(NamedTuple):
    """What Inductor measured for one plain product."""

    shape: str  # "128x4096 @ 4096x1024"
    winner: str  # Inductor's name of a candidate; tgemm's is "tgemm_mm"
    tgemm_us: float
    best_other_us: float


@dataclass
class Report:
    """What the pass did to one graph. Prints as a table."""

    matched: list[Matched] = field(default_factory=list)
    missed: list[Missed] = field(default_factory=list)
    # Nodes for which Inductor's autotuning chooses between tgemm and its own candidates, and its results.
    contested: list[str] = field(default_factory=list)
    tuned: list[Tuned] = field(default_factory=list)

    def __str__(self) -> str:
        rows = [
            (node, f"tgemm.{op}" + "".join(f" + {what}" for what in fused))
            for node, op, fused in self.matched
        ]
        rows += [
            (node, f"autotuned, {tgemm_mm.__name__} is a candidate") for node in self.contested
        ]
        rows += [
            (shape, f"{winner} wins: tgemm {own:.1f} us, the best other {other:.1f} us")
            for shape, winner, own, other in self.tuned
        ]
        rows += [(node, f"left: {reason}") for node, reason in self.missed]
        width = max((len(node) for node, _ in rows), default=0)
        lines = [f"{node:<{width}}  {what}" for node, what in rows]
        total = f"{len(self.matched)} matched, {len(self.missed)} left"
        lines.append(total + (f", {len(self.contested)} autotuned" if self.contested else ""))
        return "\n".join(lines)


_lock = threading.Lock()
_reports: deque[Report] = deque(maxlen=256)


def reports() -> tuple[Report, ...]:
    """One report for each graph that was compiled with `options` in this process, oldest first.

    The last 256 are kept. A graph that comes out of Inductor's cache was not compiled, and has none.
    """
    with _lock:
        return tuple(_reports)


def options(
    mode: str | None = None, extra: Mapping[str, Any] | None = None, *, plain: bool = True
) -> dict[str, Any]:
    """Options for torch.compile under which a model's matrix products run on tgemm.

    Args:
        mode: a mode of torch.compile, "max-autotune" for one, whose options are merged in: torch.compile
            does not take `mode` and `options` together.
        extra: further options of Inductor, which take precedence. A pass of your own in
            "post_grad_custom_pre_pass", here or in torch._inductor.config, runs before this one.
        plain: whether products with nothing to fuse go to tgemm too, but for those on CUDA that torch's own
            kernels do as fast: in true FP32, and short ones (fewer than 10^10 multiply-adds) of more than 64
            rows of aligned 16-bit operands. False leaves all of them to Inductor. Where
            the options turn autotuning on (max_autotune, max_autotune_gemm), an mm of this kind runs on
            what is fastest, `tgemm_mm` or one of Inductor's own candidates; `Report.tuned` says which.

    Returns:
        A dict for ``torch.compile(model, options=...)``, or for `inductor_configs` of
        torch._inductor.aoti_compile_and_package.

    Raises:
        ValueError: there is no such mode.
        TypeError: `extra` is no dict, or its pass cannot be called.
    """
    if extra is not None and not isinstance(extra, Mapping):
        raise TypeError(
            f"torch_gemm.inductor.options: extra must be a dict of Inductor's options, and is a "
            f"{type(extra).__name__}"
        )
    known = torch._inductor.list_mode_options()
    if mode is not None and mode not in known:
        raise ValueError(
            f"torch_gemm.inductor.options: mode is {mode!r}, and must be None or one of "
            f"{', '.join(known)}"
        )
    # Padding, which would come before this pass, helps cuBLAS with odd sizes; to tgemm it is a copy.
    own = {"shape_padding": False}
    merged = {**own, **(known[mode] if mode is not None else {}), **(extra or {})}
    other = merged.get(_HOOK, getattr(torch._inductor.config, _HOOK))
    others = other if isinstance(other, (list, tuple)) else [] if other is None else [other]
    for one in others:
        if not callable(one):
            raise TypeError(
                f"torch_gemm.inductor.options: {_HOOK} must be a pass, and is a "
                f"{type(one).__name__}"
            )
    # A pass of ours in torch._inductor.config, or in options that are merged again, is not run twice.
    others = [one for each in others for one in (each.others if isinstance(each, Pass) else [each])]
    merged[_HOOK] = Pass(tuple(others), plain)
    if plain and any(
        merged.get(name, getattr(torch._inductor.config, name))
        for name in ("max_autotune", "max_autotune_gemm")
    ):
        candidates = merged.get(_CANDIDATES, torch._inductor.config.external_matmul)
        merged[_CANDIDATES] = [*(one for one in candidates if one is not tgemm_mm), tgemm_mm]
        _register_candidate()
    return merged


# --- Autotuning -------------------------------------------------------------------------------------


def tgemm_mm(mat1: Tensor, mat2: Tensor, *, out: Tensor) -> None:
    """``out = mat1 @ mat2``: what `options` adds to `external_matmul`, Inductor's list of candidates.

    Inductor asks every candidate for every mm. Operands that tgemm does not take, which the pass reports
    as left, are ATen's here too.
    """
    if mat1.dtype in _DTYPES and mat1.device.type in _DEVICES:
        ops.matmul(mat1, mat2, out=out)
    else:
        torch.mm(mat1, mat2, out=out)


def _register_candidate() -> None:
    """Makes Inductor know `tgemm_mm` by its name.

    Compiling does that too, but a graph that comes from the cache on disk is not compiled, and calls it.
    """
    from torch._inductor import lowering  # noqa: F401  (what follows cannot be imported before it)
    from torch._inductor.kernel.mm import lazy_register_extern_choice
    from torch._inductor.select_algorithm import get_algorithm_selector_cache

    lazy_register_extern_choice(tgemm_mm)
    savers = get_algorithm_selector_cache().feedback_saver_fns
    if _note_tuning not in savers:
        savers.append(_note_tuning)


# The report of the graph that this thread is compiling.
_compiling = threading.local()


def _note_tuning(timings: dict[Any, float], op: str, inputs: Any, *_: Any) -> None:
    """Called by Inductor with the milliseconds of each candidate."""
    report = getattr(_compiling, "report", None)
    names = {getattr(choice, "name", str(choice)): ms * 1e3 for choice, ms in timings.items()}
    if op != "mm" or report is None or tgemm_mm.__name__ not in names:
        return
    a, b = ("x".join(map(str, operand.get_size())) for operand in inputs)
    winner = min(names, key=names.__getitem__)
    own = names.pop(tgemm_mm.__name__)
    tuned = Tuned(f"{a} @ {b}", winner, own, min(names.values(), default=math.inf))
    report.tuned.append(tuned)


# --- Activations ------------------------------------------------------------------------------------


def _gelu_new(x: Tensor) -> Tensor:
    """As GPT-2 and others write it in Python."""
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


_ACTIVATIONS: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
    ("relu", lambda x: torch.nn.functional.relu(x)),
    ("gelu", lambda x: torch.nn.functional.gelu(x)),
    ("gelu_tanh", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    ("gelu_tanh", _gelu_new),
    ("silu", lambda x: torch.nn.functional.silu(x)),
    ("silu", lambda x: x * torch.sigmoid(x)),
)


@functools.cache
def _templates() -> tuple[tuple[str, torch.dtype, fx.Node], ...]:
    """The last node of each activation as Inductor writes it out, for each dtype."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    templates = []
    for dtype in _DTYPES:
        for name, function in _ACTIVATIONS:
            traced = make_fx(function, decomposition_table=select_decomp_table())
            with torch.inference_mode(False), torch.no_grad():
                graph = traced(torch.ones(2, dtype=dtype)).graph
            templates.append((name, dtype, next(iter(reversed(graph.nodes))).args[0]))
    return tuple(templates)


def _match(template: Any, actual: Any, found: dict[fx.Node, fx.Node]) -> bool:
    """Whether `actual` computes what `template` does; `found` gets the node of each template node."""
    if not isinstance(template, fx.Node):
        if isinstance(template, (list, tuple)):
            return (
                isinstance(actual, (list, tuple))
                and len(template) == len(actual)
                and all(_match(t, a, found) for t, a in zip(template, actual, strict=True))
            )
        return not isinstance(actual, fx.Node) and template == actual
    if not isinstance(actual, fx.Node):
        return False
    if template in found:
        return found[template] is actual
    if template.op != "placeholder":
        if actual.op != "call_function" or actual.target is not template.target:
            return False
        if template.kwargs != actual.kwargs or not _match(template.args, actual.args, found):
            return False
    found[template] = actual
    return True


class _Activation(NamedTuple):
    name: str
    last: fx.Node
    nodes: frozenset[fx.Node]  # all of them, without the argument
    is_private: bool  # whether nothing but the last node is read by others


def _activations_of(graph: fx.Graph) -> dict[fx.Node, _Activation]:
    """The activation that reads a node, by that node."""
    activations: dict[fx.Node, _Activation] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, Tensor):
            continue
        for name, dtype, template in _templates():
            if dtype != value.dtype or node.target is not template.target:
                continue
            found: dict[fx.Node, fx.Node] = {}
            if not _match(template, node, found):
                continue
            (argument,) = (found[t] for t in found if t.op == "placeholder")
            nodes = frozenset(found.values()) - {argument}
            # Training reads some of what the activation computes on its way.
            is_private = all(set(inner.users) <= nodes for inner in nodes - {node})
            activations[argument] = _Activation(name, node, nodes, is_private)
    return activations


# --- Chains -----------------------------------------------------------------------------------------


class _Chain:
    """A product and what follows it, as far as a kernel can compute it."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        self.bias: fx.Node | None = None
        self.residual: fx.Node | None = None
        self.activation: str | None = None
        self.out_dtype: torch.dtype | None = None
        self.fused: list[str] = []
        self.last = node  # the node that the fused op replaces
        self.tip = node  # the same behind reshapes
        self.trail = [node]  # all nodes from the product to the tip
        self.sizes: Any = None  # what the last reshape up to `last` makes of the 2-d product

        self.addmm_options: dict[str, float] | None = None
        if node.target is not _aten.addmm.default:
            self.a, self.b = node.args
            return
        added, self.a, self.b = node.args
        factors = {name: node.kwargs.get(name, 1) for name in ("beta", "alpha")}
        shape, out = added.meta["val"].shape, node.meta["val"].shape
        if factors == {"beta": 1, "alpha": 1} and len(shape) == 1 and _same(shape, out[1:]):
            self.bias = added
            self.fused.append("bias")
        elif factors == {"beta": 1, "alpha": 1} and _same(shape, out):
            self.residual = added
            self.fused.append("residual")
        else:
            self.addmm_options = factors

    def extend(self, activations: dict[fx.Node, _Activation]) -> str | None:
        """Takes in what follows. Returns why it stopped, where that could have been otherwise."""
        if self.node.target is _aten.bmm.default or self.addmm_options is not None:
            return None
        sizes = None
        while self.residual is None:
            users = list(self.tip.users)
            activation = activations.get(self.tip)
            if activation is not None and self.activation is None:
                if not (activation.is_private and set(users) <= activation.nodes):
                    return f"{activation.name} follows, but its argument is read elsewhere too"
                self.activation = activation.name
                self.trail += activation.nodes
                self._take(activation.name, activation.last, sizes)
            elif len(users) == 1 and users[0].target in _RESHAPES:
                if not _same(users[0].meta["val"].shape[-1:], self.tip.meta["val"].shape[-1:]):
                    return None
                self.tip = users[0]
                self.trail.append(self.tip)
                sizes = self.tip.args[1]
            elif len(users) == 1 and users[0].target is _aten.add.Tensor and not users[0].kwargs:
                if not self._take_sum(users[0], sizes):
                    return None
            else:
                follows = [activations[user] for user in users if user in activations]
                if follows and len(users) > 1:
                    return f"{follows[0].name} follows, but its argument is read elsewhere too"
                return None
        return None

    def _take_sum(self, node: fx.Node, sizes: Any) -> bool:
        others = [arg for arg in node.args if arg is not self.tip]
        if len(others) != 1 or not isinstance(others[0], fx.Node):
            return False
        other, value, tip = others[0], others[0].meta.get("val"), self.tip.meta["val"]
        dtype = node.meta["val"].dtype
        if not isinstance(value, Tensor) or value.device != tip.device:
            return False
        if value.dtype not in (tip.dtype, torch.float32) or dtype not in (value.dtype, tip.dtype):
            return False
        if dtype == tip.dtype and value.dim() == 1 and _same(value.shape, tip.shape[-1:]):
            if self.bias is not None or self.activation is not None:
                return False
            self.bias = other
            self._take("bias", node, sizes)
            return True
        if not _same(value.shape, tip.shape):
            return False
        self.residual = other
        # Under autocast the residual stream stays in FP32.
        self.out_dtype = None if dtype == tip.dtype else dtype
        self._take("residual", node, sizes)
        return True

    def _take(self, what: str, last: fx.Node, sizes: Any) -> None:
        self.fused.append(what)
        self.last = self.tip = last
        self.trail.append(last)
        self.sizes = sizes


def _same(a: Any, b: Any) -> bool:
    """Whether two shapes are known to be equal."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return len(a) == len(b) and all(
        statically_known_true(x == y) for x, y in zip(a, b, strict=True)
    )


def _same_matrix(a: fx.Node, b: fx.Node) -> bool:
    """Whether two nodes are the same tensor, perhaps through equal reshapes and casts of one."""
    if a is b:
        return True
    if a.target is not b.target or a.target not in (*_RESHAPES, _CAST):
        return False
    of, value = b.args[0], b.meta["val"]
    return (
        a.meta["val"].dtype == value.dtype
        and _same(a.meta["val"].shape, value.shape)
        and _same_matrix(a.args[0], of)
    )


# --- The pass ---------------------------------------------------------------------------------------


class Pass(CustomGraphPass):
    """The pass itself, after those of the user. Made by `options`."""

    def __init__(self, others: tuple[Callable[[fx.Graph], Any], ...], plain: bool) -> None:
        self.others = others
        self.plain = plain
        _templates()  # traced here, because inside a compilation tracing means something else

    def uuid(self) -> Any | None:
        """What the graphs in Inductor's cache depend on; None, which means no cache, if unknown."""
        ids = []
        for other in self.others:
            own = other.uuid() if isinstance(other, CustomGraphPass) else None
            if own is None:
                return None
            ids.append(own)
        return get_hash_for_files((__file__,)), self.plain, tuple(ids)

    def __call__(self, graph: fx.Graph) -> None:
        """Changes the graph, and adds to `reports`."""
        for other in self.others:
            other(graph)
        report = Report()
        config = torch._inductor.config
        contest = self.plain and tgemm_mm in config.external_matmul
        if contest and config.cpp_wrapper:
            # C++ code, AOTInductor's for one, cannot call Python. This holds for one compilation.
            config.external_matmul = [one for one in config.external_matmul if one is not tgemm_mm]
            contest = False
        _rewrite(graph, self.plain, contest, report)
        _compiling.report = report
        with _lock:
            _reports.append(report)


def _rewrite(graph: fx.Graph, plain: bool, contest: bool, report: Report) -> None:
    """`contest`: products with nothing to fuse, if they are mm, are left to autotuning."""
    activations = _activations_of(graph)
    chains: dict[fx.Node, _Chain] = {}  # by tip
    packed: dict[_Chain, _Halves] = {}
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _PRODUCTS:
            continue
        reason = _reason_against(node)
        if reason is not None:
            report.missed.append(Missed(node.name, reason))
            continue
        chain = _Chain(node)
        reason = chain.extend(activations)
        halves = _gated_halves(chain, activations)
        if halves is not None:
            packed[chain] = halves
        elif reason is not None:
            report.missed.append(Missed(node.name, reason))
        # Two products that are added have one tip: the later one adds the earlier.
        earlier = chains.pop(chain.tip, None)
        if earlier is not None:
            earlier = _Chain(earlier.node)
            chains[earlier.tip] = earlier
        chains[chain.tip] = chain

    emitter = _Emitter(graph, report)
    for chain, halves in packed.items():
        if emitter.emit_packed_glu(chain, halves):
            del chains[chain.tip]
    for chain in list(chains.values()):
        product = _only_reader(chain.tip, _aten.mul.Tensor)
        if chain.activation is None or chain.residual is not None or product is None:
            continue
        others = [arg for arg in product.args if arg is not chain.tip]
        up = chains.get(others[0]) if len(others) == 1 else None
        if up is not None and _is_gated_pair(chain, up) and emitter.emit_glu(chain, up, product):
            del chains[chain.tip], chains[up.tip]
    for chain in chains.values():
        if not plain and (not chain.fused or chain.addmm_options is not None):
            report.missed.append(Missed(chain.node.name, "nothing to fuse, and plain=False"))
        elif not chain.fused and _is_true_fp32(chain.a):
            reason = "true FP32 with nothing to fuse, which torch's own kernels do as fast"
            report.missed.append(Missed(chain.node.name, reason))
        elif contest and not chain.fused and chain.node.target is _aten.mm.default:
            report.contested.append(chain.node.name)
        elif _is_short(chain):
            reason = "short, which torch's own kernels do as fast"
            report.missed.append(Missed(chain.node.name, reason))
        else:
            emitter.emit(chain)
    graph.lint()


def _only_reader(node: fx.Node, target: Any) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is target else None


def _reason_against(node: fx.Node) -> str | None:
    for argument in node.args:
        value = argument.meta.get("val") if isinstance(argument, fx.Node) else None
        if not isinstance(value, Tensor):
            return "an operand whose shape and dtype are not known"
        if value.dtype not in _DTYPES:
            return f"{str(value.dtype).removeprefix('torch.')} operands"
        if value.layout is not torch.strided or value.device.type not in _DEVICES:
            return f"{str(value.layout).removeprefix('torch.')} operands on {value.device.type}"
    return None


def _is_gated_pair(gate: _Chain, up: _Chain) -> bool:
    return (
        up.activation is None
        and up.residual is None
        and up.addmm_options is None
        and up.node.target is not _aten.bmm.default
        and len(up.tip.users) == 1
        and _same_matrix(gate.a, up.a)
        and _same(gate.b.meta["val"].shape, up.b.meta["val"].shape)
        and _same(gate.tip.meta["val"].shape, up.tip.meta["val"].shape)
    )


class _Halves(NamedTuple):
    """``act(gate) * up`` of the halves of one product's columns."""

    activation: str
    gate_is_first: bool
    columns: int  # of a half
    product: fx.Node
    nodes: frozenset[fx.Node]  # between the chain and the product


def _gated_halves(chain: _Chain, activations: dict[fx.Node, _Activation]) -> _Halves | None:
    if (
        chain.activation is not None
        or chain.residual is not None
        or chain.addmm_options is not None
        or chain.node.target is _aten.bmm.default
    ):
        return None
    cut = _halves_of(chain.tip)
    if cut is None:
        return None
    halves, nodes = cut
    for is_first, (gate, up) in ((True, halves), (False, halves[::-1])):
        activation = activations.get(gate)
        if activation is None or not activation.is_private or set(gate.users) - activation.nodes:
            continue
        product = _only_reader(activation.last, _aten.mul.Tensor)
        if product is not None and list(up.users) == [product] and up in product.args:
            columns = gate.meta["val"].shape[-1]
            return _Halves(activation.name, is_first, columns, product, nodes | activation.nodes)
    return None


def _halves_of(node: fx.Node) -> tuple[tuple[fx.Node, fx.Node], frozenset[fx.Node]] | None:
    """The first and the second half of a node's columns, if that is all that is read of it."""
    shape, users = node.meta["val"].shape, list(node.users)
    width, last = shape[-1], (-1, len(shape) - 1)
    if not isinstance(width, int) or width % 2:
        return None
    if len(users) == 1 and users[0].target is _aten.split.Tensor:
        _, size, *dim = users[0].args
        parts = sorted(users[0].users, key=lambda part: part.args[1])
        if size != width // 2 or (*dim, 0)[0] not in last:
            return None
        if [part.args[1] for part in parts] != [0, 1]:
            return None
        return (parts[0], parts[1]), frozenset((users[0], *parts))
    if len(users) != 2 or any(user.target is not _aten.slice.Tensor for user in users):
        return None
    parts = {}
    for user in users:
        _, dim, start, end = (*user.args, 0, None, None)[:4]
        if len(user.args) > 4 or user.kwargs or dim not in last:
            return None
        parts[start or 0, width if end is None or end > width else end] = user
    first, second = parts.get((0, width // 2)), parts.get((width // 2, width))
    if first is None or second is None:
        return None
    return (first, second), frozenset(users)


def _precision(operand: fx.Node) -> dict[str, Any]:
    precision = ops.fp32_precision(operand.meta["val"])
    return {} if precision is None else {"precision": precision}


def _is_true_fp32(operand: fx.Node) -> bool:
    value = operand.meta["val"]
    return value.dtype is torch.float32 and value.is_cuda and not _precision(operand)


def _is_short(chain: _Chain) -> bool:
    """Whether torch's own kernels do a product as fast, between others that are not tgemm's.

    Such neighbours do not let the next kernel start early, and then cuBLAS's are about a microsecond ahead
    (benchmarks/NOTES.md). A bias they add too, and a residual the kernel that reads the sum; whatever else
    there is to fuse saves a kernel, which of a very short product costs no more than that.
    """
    a, b = (operand.meta["val"] for operand in (chain.a, chain.b))
    if not a.is_cuda or a.dtype not in (torch.float16, torch.bfloat16) or a.dim() != 2:
        return False
    sizes = (*a.shape, b.shape[1], *a.stride(), *b.stride())
    if not all(isinstance(size, int) for size in sizes):
        return False
    m, k, n, *strides = sizes
    aligned = not any(size % 8 for size in (k, n, *strides) if size != 1)
    little = (
        chain.activation is None
        and chain.addmm_options is None
        and chain.out_dtype is None
        and (chain.residual is None or _has_readers(chain.last))
    )
    return m >= _MANY_ROWS and m * n * k < (_SHORT if little else _VERY_SHORT) and aligned


def _has_readers(node: fx.Node) -> bool:
    """Whether a kernel that Inductor generates reads a node, itself or reshaped."""
    return any(
        _has_readers(user) if user.target in _RESHAPES else user.target not in _PRODUCTS
        for user in node.users
        if user.op == "call_function"
    )


def _is_constant(weight: fx.Node) -> bool:
    while weight.op == "call_function" and weight.target in (_aten.permute.default, *_RESHAPES):
        weight = weight.args[0]
    return weight.op == "get_attr"


class _Emitter:
    """Puts tgemm ops in the place of chains."""

    def __init__(self, graph: fx.Graph, report: Report) -> None:
        self.graph = graph
        self.report = report
        # What took the place of a node that a chain may still name.
        self.replaced: dict[fx.Node, fx.Node] = {}

    def emit(self, chain: _Chain) -> None:
        """Replaces a chain by one op."""
        last = chain.last
        a, b, bias, residual = map(self._now, (chain.a, chain.b, chain.bias, chain.residual))
        kwargs = _precision(a)
        with self._building(last) as built:
            if chain.addmm_options is not None:
                op, args = _tgemm.addmm.default, (self._now(chain.node.args[0]), a, b)
                kwargs |= {name: float(factor) for name, factor in chain.addmm_options.items()}
            elif not chain.fused:
                op, args = _tgemm.matmul.default, (a, b)
            else:
                weight = self._weight_of(built, b)
                if residual is not None and residual.meta["val"].dim() != 2:
                    columns = chain.node.meta["val"].shape[-1]
                    residual = built.call(_aten.reshape.default, (residual, [-1, columns]))
                op, args = _tgemm.linear.default, (a, weight, bias, residual)
                if chain.activation is not None:
                    kwargs["activation"] = chain.activation
                if chain.out_dtype is not None:
                    kwargs["out_dtype"] = chain.out_dtype
                if _is_constant(weight):
                    kwargs["static_weight"] = True
            new = built.call(op, args, kwargs)
            if chain.sizes is not None:
                new = built.call(_aten.reshape.default, (new, chain.sizes))
        name = op.overloadpacket.__name__
        if self._replace(last, new, chain.trail, built, chain.node):
            self.report.matched.append(Matched(chain.node.name, name, tuple(chain.fused)))

    def emit_glu(self, gate: _Chain, up: _Chain, product: fx.Node) -> bool:
        """Replaces two chains and the product of their results. Returns whether it could."""
        a = self._now(gate.a)
        kwargs = _precision(a)
        if gate.activation != "silu":
            kwargs["activation"] = gate.activation
        with self._building(product) as built:
            weights = [self._weight_of(built, self._now(chain.b)) for chain in (gate, up)]
            if all(map(_is_constant, weights)):
                kwargs["static_weight"] = True
            args = (a, *weights, self._now(gate.bias), self._now(up.bias))
            new = built.call(_tgemm.linear_glu.default, args, kwargs)
            if gate.sizes is not None:
                new = built.call(_aten.reshape.default, (new, gate.sizes))
        if not self._replace(product, new, [*gate.trail, *up.trail], built, gate.node):
            return False
        fused = (*gate.fused, f"product with {up.node.name}", *(f"its {what}" for what in up.fused))
        self.report.matched.append(Matched(gate.node.name, "linear_glu", fused))
        return True

    def emit_packed_glu(self, chain: _Chain, halves: _Halves) -> bool:
        """Replaces a chain and the gated product of its halves, whose weights become two views."""
        a = self._now(chain.a)
        kwargs = _precision(a)
        if halves.activation != "silu":
            kwargs["activation"] = halves.activation
        product = halves.product
        sizes = chain.tip.args[1] if chain.tip.target in _RESHAPES else chain.sizes
        with self._building(product) as built:
            weight = self._weight_of(built, self._now(chain.b))
            if _is_constant(weight):
                kwargs["static_weight"] = True
            rows = [(0, halves.columns), (halves.columns, 2 * halves.columns)]
            args = [a]
            for packed in (weight, self._now(chain.bias)):
                for start, end in rows if halves.gate_is_first else reversed(rows):
                    half = None
                    if packed is not None:
                        half = built.call(_aten.slice.Tensor, (packed, 0, start, end))
                    args.append(half)
            new = built.call(_tgemm.linear_glu.default, tuple(args), kwargs)
            if sizes is not None:
                sizes = [*sizes[:-1], halves.columns]
                new = built.call(_aten.reshape.default, (new, sizes))
        if not self._replace(product, new, [*chain.trail, *halves.nodes], built, chain.node):
            return False
        fused = (*chain.fused, halves.activation, "product of its halves")
        self.report.matched.append(Matched(chain.node.name, "linear_glu", fused))
        return True

    def _now(self, node: fx.Node | None) -> fx.Node | None:
        while node in self.replaced:
            node = self.replaced[node]
        return node

    @contextlib.contextmanager
    def _building(self, last: fx.Node) -> Iterator[_Built]:
        with self.graph.inserting_before(last):
            yield _Built(self.graph, last)

    def _weight_of(self, built: _Built, b: fx.Node) -> fx.Node:
        """The (N, K) matrix whose transpose `b` is."""
        if b.target is _aten.permute.default and list(b.args[1]) == [1, 0]:
            return b.args[0]
        return built.call(_aten.permute.default, (b, [1, 0]))

    def _replace(
        self, old: fx.Node, new: fx.Node, trail: list[fx.Node], built: _Built, product: fx.Node
    ) -> bool:
        before, after = old.meta["val"], new.meta["val"]
        if before.dtype != after.dtype or not _same(before.stride(), after.stride()):
            # What follows was compiled for the strides that torch's ops would have given.
            for node in reversed(built.nodes):
                self.graph.erase_node(node)
            self.report.missed.append(
                Missed(product.name, "tgemm would return another dtype or other strides")
            )
            return False
        old.replace_all_uses_with(new)
        self.replaced[old] = new
        for node in sorted({old, *trail}, reverse=True):
            if not node.users:
                self.graph.erase_node(node)
        return True


class _Built:
    """New nodes, with the metadata of the one that they replace and values of their own."""

    def __init__(self, graph: fx.Graph, like: fx.Node) -> None:
        self.graph = graph
        self.like = like
        self.nodes: list[fx.Node] = []

    def call(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        """Adds a call at the graph's insertion point."""
        node = self.graph.call_function(target, args, kwargs or {})
        self.nodes.append(node)
        node.meta.update(self.like.meta)
        for stale in ("tensor_meta", "eager_input_vals"):
            node.meta.pop(stale, None)
        values = fx.map_arg(args, lambda argument: argument.meta["val"])
        with self.like.meta["val"].fake_mode:
            node.meta["val"] = target(*values, **(kwargs or {}))
        return node
