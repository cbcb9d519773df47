"""The matrices of a chunk and the norms, from `solve`'s source carried out on a CPU, against float64."""

import pathlib
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import emulator
import measure
import oracle

from gdn_ops.backends.hopper.chunks import Chunks, chunk_table
from gdn_ops.backends.hopper.gates import NUM_FACTORS, NUM_FACTORS_NORM, gates
from gdn_ops.backends.hopper.layouts import flat
from gdn_ops.backends.hopper.solve import solve
from gdn_ops.shapes import L2NORM_EPS, WHOLE_DOCUMENTS, Inputs, Options, sizes

BOUND = {torch.bfloat16: 2.3e-3, torch.float16: 5e-4}
"""Of the scores and of the inverse. Rounding them to their dtype costs 1.65e-3 and 2.1e-4; the largest errors of any
case here are 1.84e-3 and 3.5e-4."""

EDGES = measure.bounds_of([70, 0, 64, 1, 65])
CASES: dict[str, dict[str, Any]] = {
    "three heads": {"HK": 2, "HV": 6, "bounds": EDGES, "T": 220},
    "norm": {"HK": 2, "HV": 6, "bounds": EDGES, "T": 220, "norm": True},
    "one head": {"HK": 2, "HV": 2, "bounds": [0, 70], "decay": "extreme"},
    "parallel keys": {"HK": 1, "HV": 2, "bounds": [0, 130], "parallel_keys": True, "decay": "weak"},
    "beta=0, five heads": {"HK": 1, "HV": 5, "bounds": [0, 70], "zero_beta": True},
    "eight heads": {"HK": 2, "HV": 16, "bounds": [0, 65], "norm": True},
    "half": {"HK": 1, "HV": 3, "bounds": [0, 70], "dtype": torch.float16, "norm": True},
    "parallel keys, half": {
        "HK": 1, "HV": 3, "bounds": [0, 66], "dtype": torch.float16, "norm": True, "parallel_keys": True,
        "decay": "weak",
    },
    "parallel keys that decay": {"HK": 1, "HV": 2, "bounds": [0, 64], "parallel_keys": True},
}  # fmt: skip
ALIKE = ("parallel keys", "parallel keys, half")
"""Cases whose whole chunks count as alike."""


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def results(inputs: Inputs, options: Options, has_scores: bool = True) -> tuple[Chunks, Tensor, dict[str, Tensor]]:
    """The chunk table, gates and what `solve` filled; what it did not is NaN."""
    s = sizes(inputs)
    q, k = (flat(x) for x in inputs[:2])
    has_norm = options.use_qk_l2norm
    chunks = chunk_table(inputs.cu_seqlens, s.N, s.T, s.num_chunks, WHOLE_DOCUMENTS, q)
    decay = poisoned(s.num_chunks, s.HV, 64)
    factors = poisoned(s.num_chunks, s.HV, NUM_FACTORS_NORM if has_norm else NUM_FACTORS, 64)
    gates(
        inputs.g[0], inputs.beta[0], None, None, None, decay, factors, chunks, options, s.HK,
        solve=None, is_half=q.dtype == torch.float16,
    )  # fmt: skip
    square = (s.num_chunks, s.HV, 64, 64)
    found = {"scores": poisoned(*square, dtype=q.dtype), "solve": poisoned(*square, dtype=q.dtype)}
    found["norms"] = poisoned(s.T, 2, s.HK)
    found["factors"] = factors
    solve(
        q, k, decay, factors, chunks, options, norms=found["norms"] if has_norm else None,
        scores=found["scores"] if has_scores else None, out=found["solve"],
    )  # fmt: skip
    return chunks, decay, found


def expected(inputs: Inputs, options: Options, chunks: Chunks, decay: Tensor) -> dict[str, Tensor]:
    """The same in float64, chunks in use only."""
    s = sizes(inputs)
    x = torch.stack([inputs.q[0].double(), inputs.k[0].double()], 1)
    norms = (x.square().sum(-1) + L2NORM_EPS).rsqrt()
    if options.use_qk_l2norm:
        x = x * norms[..., None]
    lower = torch.ones(64, 64, dtype=torch.bool).tril()
    least = 2.0**-14 if inputs.q.dtype == torch.float16 else 2.0**-64
    matrices: dict[str, list[Tensor]] = {"scores": [], "solve": []}
    for c in range(int(chunks.totals[0])):
        first, valid = chunks.table[c, :2].tolist()
        pad = (0, 0, 0, 64 - valid)
        q, k = (
            torch.nn.functional.pad(part.transpose(0, 1), pad).repeat_interleave(s.HV // s.HK, 0)
            for part in x[first : first + valid].unbind(1)
        )
        beta = inputs.beta[0, first : first + valid].double().T
        beta = torch.nn.functional.pad(torch.where(beta.abs() < least, least, beta), (0, 64 - valid))
        G = decay[c].double()
        gamma = torch.where(lower, G[:, :, None] - G[:, None, :], 0.0).exp2() * lower
        matrices["scores"].append(options.scale * (q @ k.mT) * gamma)
        system = torch.eye(64, dtype=torch.float64) + (beta[:, :, None] * (k @ k.mT)).tril(-1)
        inverse = torch.linalg.solve_triangular(system, torch.diag_embed(beta), upper=False)
        matrices["solve"].append(inverse * gamma)
    return {name: torch.stack(x) for name, x in matrices.items()} | {"norms": norms}


@pytest.mark.parametrize("name", CASES)
def test_matrices_and_norms(name: str) -> None:
    case = CASES[name]
    inputs, _, _ = oracle.make(device="cpu", **case)
    options = Options(128**-0.5, case.get("norm", False))
    end = case["bounds"][-1]
    for x in (inputs.q, inputs.k):
        x[:, end:] = float("nan")
    with emulator.emulated():
        chunks, decay, found = results(inputs, options)
    want = expected(inputs, options, chunks, decay)
    used = int(chunks.totals[0])
    diagonal, strength = (x[:used].diagonal(dim1=-2, dim2=-1).double() for x in (found["solve"], want["solve"]))
    is_alike = diagonal[..., 0] != 0
    is_whole = chunks.table[:used, 1] == 64
    assert torch.equal(is_alike, (is_whole & (name in ALIKE))[:, None].expand(-1, is_alike.shape[1]))
    rounded = strength.float().to(inputs.q.dtype).double()
    assert torch.equal(diagonal, torch.where(is_alike[..., None], rounded, 0.0))
    if not options.use_qk_l2norm:
        kept = torch.where(is_alike[..., None], strength - rounded, strength)
        assert torch.equal(found["factors"][:used, :, 3].double(), kept), "what is not in the matrix"
    want["solve"] = torch.where(is_alike[..., None, None], want["solve"], want["solve"].tril(-1))
    for matrix in ("scores", "solve"):
        got, reference = found[matrix][:used], want[matrix]
        # In float16 what TF32 leaves of blocks off the diagonal shows where keys are alike, 0.9e-3.
        bound = 1.4e-3 if name == "parallel keys, half" else BOUND[inputs.q.dtype]
        assert oracle.relative_error(got, reference) <= bound, matrix
        assert found[matrix][used:].isnan().all(), "rows of chunks that there are not"
    assert torch.count_nonzero(found["solve"][:used].triu(1)) == 0
    assert torch.count_nonzero(found["scores"][:used].triu(1)) == 0
    if options.use_qk_l2norm:
        assert oracle.relative_error(found["norms"][:end], want["norms"][:end]) < 1e-6
    assert found["norms"][end if options.use_qk_l2norm else 0 :].isnan().all()


@pytest.mark.parametrize("norm", [False, True])
def test_without_scores_the_inverse_has_the_same_bits(norm: bool) -> None:
    inputs, _, _ = oracle.make(device="cpu", HK=1, HV=3, bounds=EDGES, norm=norm)
    options = Options(128**-0.5, norm)
    with emulator.emulated():
        chunks, _, whole = results(inputs, options)
        inputs.q.fill_(float("nan"))
        _, _, part = results(inputs, options, has_scores=False)
    used = int(chunks.totals[0])
    assert torch.equal(part["solve"][:used], whole["solve"][:used])
    assert part["scores"].isnan().all()
    assert part["norms"][:, 0].isnan().all(), "norms of queries"
    assert torch.equal(part["norms"][:, 1].nan_to_num(), whole["norms"][:, 1].nan_to_num())


def test_a_cut_operand_is_made_up_for() -> None:
    """TF32 operands are cut off, not rounded; left alone that makes A's far blocks smaller by 1.4e-3 of themselves."""
    inputs, _, _ = oracle.make(device="cpu", HK=1, HV=2, bounds=[0, 256], dtype=torch.float16)
    with emulator.emulated():
        chunks, decay, found = results(inputs, Options(128**-0.5, True))
    want = expected(inputs, Options(128**-0.5, True), chunks, decay)["solve"]
    far = torch.arange(64)[:, None] // 16 > torch.arange(64)[None, :] // 16
    got, want = found["solve"][: want.shape[0]][..., far].double(), want[..., far]
    slope = (got * want).sum() / want.square().sum()
    assert abs(slope - 1) < 2e-4


def test_roundings_of_keys_that_are_alike_keep_the_sums() -> None:
    """Of the rows and columns of 16 x 16 diagonal blocks, but for what the last row and the first column lose again;
    and `gates` finds the mark again in the matrix."""
    inputs, _, _ = oracle.make(device="cpu", HK=1, HV=3, bounds=[0, 100], decay="weak", parallel_keys=True)
    s, options = sizes(inputs), Options(128**-0.5)
    with emulator.emulated():
        chunks, decay, found = results(inputs, options)
        again = torch.full_like(found["factors"], float("nan"))
        gates(
            inputs.g[0], inputs.beta[0], None, None, None, decay, again, chunks, options, s.HK,
            solve=found["solve"], is_half=False,
        )  # fmt: skip
    used = int(chunks.totals[0])
    assert torch.equal(again[:used, :, :4], found["factors"][:used, :, :4])
    blocks = [slice(16 * i, 16 * i + 16) for i in range(4)]
    got = torch.stack([found["solve"][0, :, i, i].double() for i in blocks])
    want = torch.stack([expected(inputs, options, chunks, decay)["solve"][0, :, i, i] for i in blocks])
    strength = want.diagonal(dim1=-2, dim2=-1)
    got = got.tril(-1) + torch.diag_embed(strength)
    nearest = want.float().to(torch.bfloat16).double().tril(-1) + torch.diag_embed(strength)

    def errors(x: Tensor) -> Tensor:
        """Of sums of rows 1..14 and of columns 1..14: neither gets what another one has lost."""
        error = x - want
        return torch.stack([error.sum(-1)[..., 1:15].square().mean(), error.sum(-2)[..., 1:15].square().mean()]).sqrt()

    assert (errors(got) < 0.6 * errors(nearest)).all(), (errors(got), errors(nearest))
