"""`explain`: compile a model only as far as the passes go, and show what became of each registered call."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule

from inductor_passes import pipeline, settings
from inductor_passes.report import Report, UnpackedCallError


def eager_backend(
    on_report: Callable[[Report], None] | None = None, *, decompositions: bool = True
) -> Callable[..., Any]:
    """A `torch.compile` backend that runs the passes and then the graph, operator by operator, without code generation.

    decompositions: trace with Inductor's decompositions (what Inductor's own joint graph looks like) or without any.
    """

    def run(gm: GraphModule) -> None:
        report = pipeline.rewrite_graph(gm.graph)
        gm.recompile()
        if on_report is not None and len(report):
            on_report(report)

    def partition(gm: GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        run(gm)
        return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def as_it_is(gm: GraphModule, inputs: Any) -> Any:
        return _boxed(gm)

    def inference(gm: GraphModule, inputs: Any) -> Any:
        run(gm)
        return _boxed(gm)

    return aot_autograd(
        fw_compiler=as_it_is,
        bw_compiler=as_it_is,
        inference_compiler=inference,
        partition_fn=partition,
        decompositions=dict(select_decomp_table()) if decompositions else None,
    )


def _boxed(gm: GraphModule) -> Callable[[list[Any]], Any]:
    @functools.wraps(gm.forward)
    def run(args: list[Any]) -> Any:
        values = tuple(args)
        args.clear()
        return gm(*values)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def explain(function: Callable[..., Any], *inputs: Any, strict: bool = False, **keywords: Any) -> Report:
    """What the passes do to every registered call of a model or function, and why not more.

    Args:
        function: a module, a function, or what `torch.compile` made of one.
        inputs, keywords: what to call it with. It is traced as for training if a gradient is asked for (grad mode on
            and a parameter or input that requires grad), and run forward once, uncompiled.
        strict: raise unless there is a call and every call is packed whole.

    Returns:
        A `Report`: `.calls` with `.packed`, `.reason`, `.detail`, `.location`, `.saved_bytes`, `.operands` each; print
        it for a table.

    Raises:
        UnpackedCallError: with `strict`, naming the calls. Errors of the function itself pass through.
        TypeError: `function` cannot be called.
    """
    if not callable(function):
        raise TypeError(f"explain(model, *inputs): model must be a module or a function, got {type(function).__name__}")
    reports: list[Report] = []
    compiled = torch.compile(_uncompiled(function), backend=eager_backend(reports.append))
    # Every call here compiles anew, and beyond these limits Dynamo would run the code uncompiled and unseen.
    limits = {"recompile_limit": 1 << 30, "accumulated_recompile_limit": 1 << 30}
    with settings.configured(strict=False), torch._dynamo.config.patch(limits):
        compiled(*inputs, **keywords)
    report = sum(reports, Report())
    if strict:
        if not len(report):
            raise UnpackedCallError("no registered op in the graph")
        missing = tuple(c for c in report if not c.packed)
        if missing:
            raise UnpackedCallError(f"{len(missing)} call(s) not packed whole\n{Report(missing)}")
    return report


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """What was given to `torch.compile`, in any of its forms, or the function itself."""
    plain = getattr(function, "_orig_mod", None) or getattr(function, "_torchdynamo_orig_callable", None) or function
    if isinstance(plain, torch.nn.Module):
        forward = vars(plain).get("forward")
        if hasattr(forward, "_torchdynamo_orig_callable"):  # model.forward = torch.compile(model.forward)
            return forward._torchdynamo_orig_callable  # type: ignore[no-any-return, union-attr]
        if getattr(plain, "_compiled_call_impl", None) is not None:  # model.compile()
            return plain._call_impl
    return plain
