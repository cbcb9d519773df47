"""Walks against float64, without a GPU (the kernel's source, emulated) and on one."""

import pathlib
import sys
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import emulator

from gdn_ops.backends.hopper import launch, walk
from gdn_ops.backends.triton import walk as triton_walk
from gdn_ops.context_parallel import segments
from gdn_ops.shapes import Stage

D = 128
BOUND = 2e-6
"""Relative error of a state after at most four steps: a few roundings of float32."""

STEPS = [
    [(0, -1, -1), (5, 4, 2), (-1, -1, -1), (1, 0, 3)],
    [(4, 2, 5), (-1, -1, -1), (2, -1, 0), (3, 5, 1)],
    [(-1, -1, -1), (-1, -1, -1), (-1, -1, -1), (-1, -1, 6)],
    [(2, 1, -1), (0, 3, 4), (1, 2, 8), (5, 0, 9)],
]
"""With steps that do not exist, that take no M and that nobody asks for the state after; no path writes row 7."""

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


class Problem(NamedTuple):
    """The arguments of a walk; the first stage's rows lie in two blocks with something else between them."""

    out: Tensor
    states: Tensor
    starts: Tensor
    steps: Tensor
    stages: tuple[Stage, Stage]

    def divided(self, num_first: int) -> tuple[Stage, ...]:
        """The stages, the first of so many steps."""
        counts = num_first, self.steps.shape[1] - num_first
        return tuple(stage._replace(num_steps=n) for stage, n in zip(self.stages, counts, strict=True))


def make(transposed: bool, HV: int, device: str = "cpu") -> Problem:
    gen = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, D, D, generator=gen).to(device)

    moves = rand(2, 4, HV)[:, :3] * D**-0.5
    return Problem(
        out=rand(10, HV),
        states=rand(3, HV),
        starts=torch.tensor([2, 0, -1, 1], dtype=torch.int32, device=device),
        steps=torch.tensor(STEPS, dtype=torch.int32, device=device),
        stages=(
            Stage(rand(2, 5, HV)[:, 1:4], moves, 4, transposed, not transposed),
            Stage(rand(1, 6, HV), rand(1, 6, HV) * D**-0.5, 0, not transposed, transposed),
        ),
    )


def walked(kernel: Any, problem: Problem, states: Tensor | None, stages: tuple[Stage, ...]) -> Tensor:
    out = problem.out.clone()
    kernel.walk(out, states, None if states is None else problem.starts, problem.steps, stages)
    return out


def expected(problem: Problem, states: Tensor | None, stages: tuple[Stage, ...]) -> Tensor:
    """By torch operations, in float64."""
    first, *later = [Stage(s.sources.cpu(), s.moves.cpu(), *s[2:]) for s in stages]
    out, states = problem.out.cpu().clone(), None if states is None else states.cpu()
    segments.walk(out, states, None if states is None else problem.starts.cpu(), problem.steps.cpu(), first, *later)
    return out.to(problem.out.device)


def check(problem: Problem) -> None:
    """In one stage and in two, of which either may be empty; with and without states to start from."""
    for states, num_first in (
        (problem.states, 4), (None, 4), (problem.states[:0], 2), (problem.states, 3), (None, 1), (problem.states, 0),
    ):  # fmt: skip
        stages = problem.divided(num_first)
        found, want = walked(walk, problem, states, stages), expected(problem, states, stages)
        errors = (found - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)
        assert torch.equal(found[7], problem.out[7]), "which no step writes"
        if states is not problem.states:
            assert not found[6].any()
        assert errors.nan_to_num(0.0).max() <= BOUND, errors
    stage = problem.divided(4)[:1]
    assert torch.equal(walked(walk, problem, None, stage), walked(walk, problem, None, problem.divided(4)))


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("columns, programs", [(16, 132), (32, 16), (64, 8)])
def test_walk_is_the_torch_form(columns: int, programs: int, transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four paths of one head, on a device that runs so many programs at once."""
    monkeypatch.setattr(walk, "_PROGRAMS", programs)
    assert walk.value_columns(len(STEPS)) == columns
    with emulator.emulated():
        check(make(transposed, 1))


def test_moves_that_nobody_names_need_not_be_there() -> None:
    problem = make(True, 1)
    steps = problem.steps.clone()
    steps[..., 1] = -1
    stages = tuple(stage._replace(moves=stage.moves[:, :0]) for stage in problem.divided(2))
    problem = problem._replace(steps=steps)
    with emulator.emulated():
        found = walked(walk, problem, problem.states, stages)
    assert torch.equal(found, expected(problem, problem.states, stages))


def test_what_is_not_finite_stays_where_no_move_takes_it() -> None:
    """A step without M does not look at the state, and one without H leaves it."""
    problem = make(True, 1)
    steps = torch.tensor([[(0, -1, 0), (-1, -1, 1), (1, -1, 2), (2, 1, 3)]], dtype=torch.int32)
    stages = problem.divided(4)
    stages[0].sources[0, 0] = float("nan")
    problem = problem._replace(steps=steps)
    with emulator.emulated():
        found = walked(walk, problem, None, stages)
    assert found[:2].isnan().all()
    assert found[2:4].isfinite().all()


def test_supports(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make(True, 1)
    assert not walk.supports(problem.out, problem.stages), "a CPU"
    monkeypatch.setattr(walk, "is_hopper", lambda device: True)
    assert walk.supports(problem.out, problem.stages)
    assert not walk.supports(problem.out.double(), problem.stages)
    assert not walk.supports(problem.out[..., :64], problem.stages)
    odd = torch.empty(2 * 6 * D * D + 2)
    for offset, stride in ((1, 6 * D * D), (0, 6 * D * D + 2)):  # off 16 bytes; blocks that begin inside a row
        moves = odd.as_strided((2, 6, 1, D, D), (stride, D * D, D * D, D, 1), offset)
        assert not walk.supports(problem.out, (problem.stages[0]._replace(moves=moves), problem.stages[1]))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("HV", [2, 8, 48])
def test_walk_on_a_gpu(HV: int, transposed: bool) -> None:
    problem = make(transposed, HV, "cuda")
    assert launch.is_hopper(problem.out.device)
    check(problem)
    stages = problem.divided(2)
    found = walked(walk, problem, problem.states, stages)
    other = walked(triton_walk, problem, problem.states, stages)
    assert (found - other).norm() / other.norm() <= BOUND


@pytest.mark.gpu
@needs_hopper
def test_bits_do_not_depend_on_the_grid() -> None:
    """Nor on the other paths and heads, nor on where the blocks of rows lie."""
    problem = make(True, 48, "cuda")
    stages = problem.divided(2)
    found = walked(walk, problem, problem.states, stages)
    for _ in range(20):
        assert torch.equal(found, walked(walk, problem, problem.states, stages))
    for path in range(len(STEPS)):
        rows = [output for _, _, output in STEPS[path] if output >= 0]
        for heads, columns in ((slice(0, 2), 16), (slice(5, 29), 32), (slice(0, 48), 64)):
            assert walk.value_columns(heads.stop - heads.start) == columns
            part = Problem(
                problem.out[:, heads].contiguous(), problem.states[:, heads].contiguous(),
                problem.starts[path : path + 1], problem.steps[path : path + 1], problem.stages,
            )  # fmt: skip
            own = tuple(
                stage._replace(
                    sources=stage.sources[:, :, heads].contiguous(), moves=stage.moves[:, :, heads].contiguous()
                )
                for stage in stages
            )
            assert torch.equal(walked(walk, part, part.states, own)[rows], found[rows][:, heads])
