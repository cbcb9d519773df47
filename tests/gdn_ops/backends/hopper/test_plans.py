"""A plan launches what the host code launches, argument by argument, without a GPU and without compiling."""

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import gdn_ops
from gdn_ops import ops, outputs, settings, shapes
from gdn_ops.backends import hopper, launching, plans
from gdn_ops.backends.hopper import summaries, walk
from gdn_ops.context_parallel import Context, partition, path, segments, sharing
from gdn_ops.repeats import remembered
from gdn_ops.shapes import Inputs, Options, Turns, packed_width

D = 128
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "documents in two groups of heads, three parts": {"HK": 2, "varlen": True, "turns": Turns(2, 3)},
    "a batch in parts, every option": {"B": 2, "everything": True, "save": "inputs", "turns": Turns(1, 2)},
    "packed, every option": {"HK": 2, "varlen": True, "everything": True, "packed": True, "save": "inputs"},
    "batch, states kept": {"B": 2, "T": 100, "save": "states"},
    "one long document": {"T": 16384, "save": "solve"},
    "one long document in stretches": {"HK": 8, "T": 10000, "save": "solve"},
}


class Launches:
    """Takes launches."""

    def __init__(self) -> None:
        self.taken: list[tuple[Any, Any, tuple[Any, ...], dict[str, Any]]] = []

    def add(self, kernel: Any, grid: Any, args: tuple[Any, ...], options: Any) -> None:
        self.taken.append((kernel, grid, args, dict(options)))


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((hopper, "_is_hopper"), (walk, "is_hopper")):
        monkeypatch.setattr(module, name, lambda device: True)
    monkeypatch.setattr(ops, "_AUTO", {"cpu": ("hopper",), "meta": ("hopper",)})
    monkeypatch.setitem(hopper.gradients.__globals__, "multiprocessors", lambda: 132)
    # What the forward keeps for a cut document depends on the device, and stand-ins are on none.
    monkeypatch.setattr(outputs, "_UNCUT_DEVICES", ())


def calls_of(
    HK: int = 1, R: int = 3, B: int = 1, T: int = 320, varlen: bool = False, everything: bool = False,
    packed: bool = False, save: str = "solve", turns: Turns | None = None,
) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:  # fmt: skip
    """A forward and a backward op, their tensors and options; contents do not matter."""
    HV = HK * R
    row = torch.empty(B, T, packed_width(HK, HV, D), dtype=torch.bfloat16)
    operands = (row,) if packed else ops._Heads(HK, HV, D).views(row)
    cu = torch.tensor([0, 100, 230, T]) if varlen else None
    state = torch.empty(3 if varlen else B, HV, D, D) if everything else None
    gate = (torch.empty(HV), torch.empty(HV)) if everything else (None, None)
    scales = (torch.empty(B, T, HV), torch.empty(B, T, HV))
    options = {"scale": 0.1, "use_qk_l2norm": everything, "use_beta_sigmoid": everything}
    if packed:
        options |= {"num_qk_heads": HK, "num_v_heads": HV, "head_dim": D}
    meta = [x if x is None else x.to("meta") for x in (*operands, *scales, state, cu, *gate)]
    name = "chunk_packed" if packed else "chunk"
    kept = ops._IMPLEMENTATIONS[f"{name}_fwd"][1](*meta, **options, save=save, output_final_state=everything)
    saved = [torch.empty(x.shape, dtype=x.dtype) for x in kept[2:]]
    do = torch.empty(B, T, HV, D, dtype=torch.bfloat16)
    forward = (*operands, *scales, state, cu, *gate)
    backward = (do, state, *operands, *scales, *saved, state, cu, *gate)
    return [
        (f"{name}_fwd", forward, {**options, "save": save, "output_final_state": everything}),
        (f"{name}_bwd", backward, options),
    ]


def in_turns(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the case's backward go through groups of heads and parts of documents, if it says so."""
    if "turns" in case:
        monkeypatch.setattr(shapes, "turns", lambda s, most_bytes: case["turns"])
        monkeypatch.setattr(hopper, "_CHAINED_DOCUMENTS", 0)
        monkeypatch.setattr(settings, "_current", dataclasses.replace(settings.current(), cut_documents=False))


def compare(
    run: Callable[..., tuple[Tensor, ...]],
    tensors: tuple[Tensor | None, ...],
    options: dict[str, Any],
    monkeypatch: Any,
) -> int:
    """Number of launches, all found equal."""
    launches = Launches()
    launching.recording.recorder = launches
    try:
        results = run(*tensors, **options)
    finally:
        launching.recording.recorder = None
    compiled: list[tuple[Any, Any]] = []

    def compiled_for(kernel: Any, grid: Any, args: Any, options: Any) -> tuple[Any, tuple[Any, ...]]:
        compiled.append((kernel, grid))
        return SimpleNamespace(run=None), tuple(options.values())

    monkeypatch.setattr(launching, "compiled_for", compiled_for)
    plan = plans.record(lambda stand_ins: run(*stand_ins, **options), tensors, torch.device("cpu"))
    assert plan is not None
    for found, wanted in zip(plan.outputs, results, strict=True):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        assert found.strides == wanted.stride()
    assert compiled == [launch[:2] for launch in launches.taken]

    known = (*tensors, *results)
    workspace = 1 << 50
    addresses = (*[0 if x is None else x.data_ptr() for x in known], workspace)
    storages = {x.untyped_storage().data_ptr() for x in known if x is not None}
    bases: dict[int, int] = {}
    """Where in the workspace a temporary tensor's storage starts, this launch and every other."""

    def same(found: Any, wanted: Tensor) -> None:
        if wanted.numel() == 0:  # never read, wherever it is
            return
        storage = wanted.untyped_storage()
        if storage.data_ptr() in storages:
            assert found == wanted.data_ptr()
        else:
            assert workspace <= found < workspace + plan.workspace_bytes
            assert (
                bases.setdefault(storage._cdata, found - wanted.storage_offset() * wanted.element_size())
                + (wanted.storage_offset() * wanted.element_size())
                == found
            )
            assert found + storage.nbytes() - wanted.storage_offset() * wanted.element_size() <= (
                workspace + plan.workspace_bytes
            )

    for step, (_, _, args, constants) in zip(plan.steps, launches.taken, strict=True):
        found_args, _ = step.at(addresses)
        for found, wanted in zip(found_args, (*args, *constants.values()), strict=True):
            if isinstance(wanted, Tensor):
                same(found, wanted)
            elif hasattr(wanted, "block_shape"):
                same(found.base.data_ptr(), wanted.base)
                for field in ("shape", "strides", "block_shape", "layout", "padding"):
                    assert getattr(found, field) == getattr(wanted, field)
                assert found.base.dtype == wanted.base.dtype
            else:
                assert found == wanted
                assert type(found) is type(wanted)
    return len(plan.steps)


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("name", CASES)
def test_a_plan_launches_what_the_host_code_launches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    in_turns(case, monkeypatch)
    with settings.configure(fast_calls=True):
        for op, tensors, options in calls_of(**case):
            assert compare(ops._IMPLEMENTATIONS[op][0], tensors, options, monkeypatch) >= 4


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("name", CASES)
def test_a_plan_needs_the_memory_that_scratch_bytes_tells(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the alignment of each tensor in the workspace, and what is dead before the most is needed."""
    alignment = 16 * plans._ALIGNMENT
    case = {**CASES[name], "packed": False}
    save = case.get("save", "solve")
    in_turns(case, monkeypatch)
    monkeypatch.setattr(launching, "compiled_for", lambda kernel, grid, args, options: (SimpleNamespace(run=None), ()))
    with settings.configure(fast_calls=True):
        for op, tensors, options in calls_of(**case):
            run = ops._IMPLEMENTATIONS[op][0]
            plan = plans.record(lambda x, run=run, options=options: run(*x, **options), tensors, torch.device("cpu"))
            assert plan is not None
            backward = op == "chunk_bwd"
            inputs = Inputs(*tensors[2:7], *tensors[-4:]) if backward else Inputs(*tensors)
            told = hopper.scratch_bytes(inputs, Options(0.1, options["use_qk_l2norm"]), backward=backward, save=save)
            assert plan.workspace_bytes - alignment <= told <= 1.01 * plan.workspace_bytes + alignment


# ---- context parallelism: one rank whose documents are in parts, so that there is nobody to talk to

BATCHES = (
    partition([0, 300, 700], fragments=[[(1, 100, 300), (0, 0, 300), (1, 0, 100)]]),
    partition([0, 290, 700], fragments=[[(1, 110, 300), (0, 0, 290), (1, 0, 110)]]),
)
HK, HV, TOKENS = 1, 2, 700
SHARED = {
    "_prepare": (sharing._prepare, sharing._PREPARE_NAMES),
    "_forward": (sharing._forward, sharing._ALL_NAMES),
    "_prepare_backward": (sharing._prepare_backward, sharing._PREPARE_NAMES),
    "_states": (sharing._states, sharing._ALL_NAMES),
    "_gradients": (sharing._gradients, sharing._GRADIENTS_NAMES),
}


def context_step(context: Context, state: Tensor, do: Tensor) -> None:
    row = torch.zeros(1, TOKENS, packed_width(HK, HV, D), dtype=torch.bfloat16, requires_grad=True)
    g, beta = torch.zeros(2, 1, TOKENS, HV)
    o, final = gdn_ops.chunk_gated_delta_rule_packed(
        row, g, beta, num_qk_heads=HK, num_v_heads=HV, initial_state=state, output_final_state=True, cp_context=context
    )
    torch.autograd.backward([o, final], [do, state])


@pytest.fixture
def context_calls(on_a_cpu: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[Any, ...]]]:
    """Ops as on a GPU, without memory of earlier calls; the calls of their parts that can be repeated."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    monkeypatch.setattr(segments, "_on_a_gpu", lambda x: True)
    for name, (run, _) in ops._IMPLEMENTATIONS.items():
        monkeypatch.setitem(ops.kernels, (name, "cpu"), ops._on_gpu(name, run))
    for name, op in segments._IMPLEMENTATIONS.items():
        part = remembered(op.part, op.names.split(), op.backend_of, None, counts_copies=False)

        def noted(*args: Any, part: Any = part, name: str = name, **kwargs: Any) -> Any:
            found.setdefault(name, []).append((args, kwargs))
            return part(*args, **kwargs)

        monkeypatch.setitem(ops.kernels, (name, "cpu"), functools.partial(op.call, noted))
    for name, shared in SHARED.items():
        part = sharing._again(*shared)

        def noted(*args: Any, part: Any = part, name: str = name, **kwargs: Any) -> Any:
            found.setdefault(name, []).append((args, kwargs))
            return part(*args, **kwargs)

        monkeypatch.setattr(sharing, name, noted)
    return found


@pytest.mark.parametrize("pieces", [1, 6])
def test_the_plans_of_summaries_launch_what_their_host_code_launches(
    pieces: int, context_calls: dict[str, list[tuple[Any, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    state, do = torch.zeros(2, HV, D, D), torch.zeros(1, TOKENS, HV, D, dtype=torch.bfloat16)
    with settings.configure(fast_calls=True):
        monkeypatch.setattr(launching.recording, "recorder", Launches())
        context_step(BATCHES[0].context(0, device="cpu", pieces=pieces), state, do)
        counts = {}
        for name, calls in context_calls.items():
            if name in SHARED:
                run, names = SHARED[name]
            else:
                run, names = segments._IMPLEMENTATIONS[name].part, segments._IMPLEMENTATIONS[name].names.split()
            for args, options in calls:
                assert len(args) >= len(names)
                counts[name] = compare(run, args, options, monkeypatch)
    assert counts == {
        "_prepare": 3,  # chunks, gates, matrices
        "segment_summary_fwd": 2,  # recurrence, walk
        "_forward": 2,  # recurrence, zeros after the last document
        "segment_combine": 1,  # a walk
        "_prepare_backward": 1,  # gates
        "segment_summary_bwd": 2,  # recurrence, walk
        "_states": 1,  # recurrence
        "_gradients": 4,  # recurrence, gradients, epilogue, zeros after the last document
    }


def test_the_plans_of_a_summary_that_shares_nothing(
    context_calls: dict[str, list[tuple[Any, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a graph."""
    state, do = torch.zeros(2, HV, D, D), torch.zeros(1, TOKENS, HV, D, dtype=torch.bfloat16)
    monkeypatch.setattr(path, "prepare", lambda call: None)
    monkeypatch.setattr(path, "prepare_backward", lambda call, saved, tables: None)
    with settings.configure(fast_calls=True):
        monkeypatch.setattr(launching.recording, "recorder", Launches())
        context_step(BATCHES[0].context(0, device="cpu", pieces=6), state, do)
        op = segments._IMPLEMENTATIONS["segment_summary_fwd"]
        ((args, options),) = context_calls["segment_summary_fwd"]
        # chunks, gates, matrices, recurrence, walk
        assert compare(op.part, args, options, monkeypatch) == 5
        op = segments._IMPLEMENTATIONS["segment_summary_bwd"]
        ((args, options),) = context_calls["segment_summary_bwd"]
        # chunks, gates, recurrence, walk
        assert compare(op.part, args, options, monkeypatch) == 4


def test_a_second_step_repeats_the_launches_of_the_first_with_another_batch_s_tables(
    context_calls: dict[str, list[tuple[Any, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    state, do = torch.zeros(2, HV, D, D), torch.zeros(1, TOKENS, HV, D, dtype=torch.bfloat16)
    taken: list[tuple[str, Any, tuple[Any, ...]]] = []

    class Compiled:
        run = None
        metadata = None

        def __init__(self, kernel: Any):
            self.name = kernel.fn.__name__

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args: taken.append((self.name, grid, args))

    def compiled_for(kernel: Any, grid: Any, args: Any, options: Any) -> tuple[Any, tuple[Any, ...]]:
        return Compiled(kernel), tuple(options.values())

    monkeypatch.setattr(launching, "compiled_for", compiled_for)
    host_code: list[str] = []
    for name in ("segments_fwd", "segments_bwd"):
        run = getattr(summaries, name)
        monkeypatch.setattr(summaries, name, lambda *a, n=name, run=run: (host_code.append(n), run(*a)))
    contexts = [part.context(0, device="cpu", pieces=6) for part in (BATCHES[0], *BATCHES)]
    with settings.configure(fast_calls=True):
        launches = Launches()
        with monkeypatch.context() as patch:
            patch.setattr(launching.recording, "recorder", launches)
            context_step(contexts[0], state, do)
        first = [(kernel.fn.__name__, grid) for kernel, grid, _, _ in launches.taken]
        assert [name for name, _ in first].count("_walk_tma_kernel") == 4
        context_step(contexts[1], state, do)
        assert [launch[:2] for launch in taken] == first
        assert host_code == ["segments_fwd", "segments_bwd"] * 2, "the second one is recorded"
        taken.clear()
        gdn_ops.reset_stats()
        context_step(contexts[2], state, do)
    assert [launch[:2] for launch in taken] == first
    assert len(host_code) == 4
    passed = {x for _, _, args in taken for x in args if isinstance(x, int)}
    mine, others = contexts[2].plan, contexts[1].plan
    walks = ("fold", "ways", "backward_fold", "backward_ways")
    for field in ("cu_seqlens", "forward_saved_table", "backward_saved_table", *walks):
        assert getattr(mine, field).data_ptr() in passed, field
        assert getattr(others, field).data_ptr() not in passed, field
    assert gdn_ops.stats().packed_gradients == 1
