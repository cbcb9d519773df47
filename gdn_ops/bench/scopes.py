"""How a case is run: the op alone, from packed row to packed row gradient, or inside a projection block."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import gdn_ops
import inductor_passes
from gdn_ops import settings
from gdn_ops.bench.cases import Case, Data
from gdn_ops.bench.providers import Provider, split

SCOPES = ("kernel", "row", "block", "block-silu")
"""kernel: the op and its backward, no autograd; row: packed row in, packed row gradient out, through the public
function; block: projection -> row -> split -> op -> projection; block-silu: the same with SiLU on the row."""

FORMS = ("plain", "packed", "views", "contiguous")
"""plain: split views; packed: the packed function; views: `packed_qkv_views`; contiguous: three contiguous leaves."""

HIDDEN = 2048


@dataclass(frozen=True)
class Prepared:
    """A runnable: forward returns what backward takes; both may be called again and again."""

    forward: Callable[[], Any]
    backward: Callable[[Any], None]
    gradients: Callable[[], Any]
    clear: Callable[[], None]

    def step(self) -> None:
        """One forward and one backward."""
        self.backward(self.forward())


def _backend_of(provider: Provider) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if provider.backend is None else settings.configure(backend=provider.backend)


@contextlib.contextmanager
def _route(provider: Provider, packed_pass: bool) -> Iterator[None]:
    with _backend_of(provider), contextlib.nullcontext() if packed_pass else inductor_passes.disabled():
        yield


def _compile(run: Callable[..., Tensor], provider: Provider) -> Callable[..., Tensor]:
    # Every line closes over other data with the same code: without a reset the later ones would meet Dynamo's
    # recompile limit and run eagerly under the name "compiled". Other libraries break the graph; this one never may.
    torch.compiler.reset()
    return torch.compile(run, dynamic=False, fullgraph=provider.ours)


def kernel(case: Case, data: Data, provider: Provider) -> Prepared:
    """The op on views of the row and its row-writing backward, below autograd."""
    if not provider.ours:
        raise NotImplementedError("scope kernel measures this package's own ops")
    heads = {"num_qk_heads": case.num_qk_heads, "num_v_heads": case.num_v_heads, "head_dim": case.head_dim}
    options: dict[str, Any] = {**heads, "scale": case.head_dim**-0.5, "use_qk_l2norm": case.use_qk_l2norm}
    options["deterministic"] = provider.deterministic
    inputs = (None, data.cu_seqlens)
    found: list[Any] = []

    def forward() -> Any:
        with _backend_of(provider):
            return torch.ops.gdn.chunk_packed_fwd(
                data.row, data.g, data.beta, *inputs, **options, save=settings.current().save
            )

    def backward(out: Any) -> None:
        with _backend_of(provider):
            found[:] = torch.ops.gdn.chunk_packed_bwd(
                data.do, None, data.row, data.g, data.beta, *out[2:], *inputs, **options
            )

    return Prepared(forward, backward, lambda: tuple(found[:3]), found.clear)


def row(
    case: Case, data: Data, provider: Provider, form: str, compiled: bool, recompute: bool, packed_pass: bool = True
) -> Prepared:
    """Packed row (or three contiguous leaves) in, its gradient out."""
    assert provider.call is not None
    call = provider.call
    if form in ("packed", "views") and not provider.ours:
        raise NotImplementedError(f"form {form} is this package's own")
    g, beta = (x.detach().clone().requires_grad_() for x in (data.g, data.beta))
    data = data._replace(g=g, beta=beta)
    heads: dict[str, Any] = {
        "num_qk_heads": case.num_qk_heads,
        "num_v_heads": case.num_v_heads,
        "head_dim": case.head_dim,
    }
    if form == "contiguous":
        leaves = [x.detach().contiguous().requires_grad_() for x in split(case, data.row)]
    else:
        leaves = [data.row.detach().requires_grad_()]

    def body(*xs: Tensor) -> Tensor:
        if form == "contiguous":
            return call(case, data, xs[0], xs[1], xs[2])
        if form == "packed":
            return gdn_ops.chunk_gated_delta_rule_packed(
                xs[0],
                g,
                beta,
                **heads,
                use_qk_l2norm_in_kernel=case.use_qk_l2norm,
                cu_seqlens=data.cu_seqlens,
                deterministic=provider.deterministic,
            )[0]
        views = gdn_ops.packed_qkv_views(xs[0], **heads) if form == "views" else split(case, xs[0])
        return call(case, data, *views)

    run: Callable[..., Tensor] = body
    if recompute:
        run = lambda *xs: checkpoint(body, *xs, use_reentrant=False)  # noqa: E731
    if compiled:
        run = _compile(run, provider)

    def clear() -> None:
        for x in (*leaves, g, beta):
            x.grad = None

    def forward() -> Tensor:
        clear()
        with _route(provider, packed_pass):
            return run(*leaves)

    def backward(o: Tensor) -> None:
        with _route(provider, packed_pass):
            o.backward(data.do)

    return Prepared(forward, backward, lambda: (*(x.grad for x in leaves), g.grad, beta.grad), clear)


def block(case: Case, data: Data, provider: Provider, silu: bool, packed_pass: bool) -> Prepared:
    """A compiled layer around the op; the pass on or off."""
    assert provider.call is not None
    call = provider.call
    device = data.row.device
    gen = torch.Generator(device=device).manual_seed(1)

    def weight(*shape: int) -> Tensor:
        w = torch.randn(*shape, generator=gen, device=device) * shape[0] ** -0.5
        return w.to(case.dtype).requires_grad_()

    into, out = weight(HIDDEN, case.width), weight(case.num_v_heads * case.head_dim, HIDDEN)
    x = torch.randn(case.batch, case.tokens, HIDDEN, generator=gen, device=device).to(case.dtype).requires_grad_()
    dy = torch.randn(case.batch, case.tokens, HIDDEN, generator=gen, device=device).to(case.dtype)

    def body(x: Tensor) -> Tensor:
        packed = x @ into
        if silu:
            packed = torch.nn.functional.silu(packed)
        return call(case, data, *split(case, packed)).flatten(-2) @ out

    compiled = _compile(body, provider)

    def clear() -> None:
        x.grad = into.grad = out.grad = None

    def forward() -> Tensor:
        clear()
        with _route(provider, packed_pass):
            return compiled(x)

    def backward(y: Tensor) -> None:
        with _route(provider, packed_pass):
            y.backward(dy)

    return Prepared(forward, backward, lambda: (x.grad, into.grad, out.grad), clear)
