"""Run by test_conv.py in a process of its own: every check, its result as a line of JSON."""

import importlib.util
import json
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import interpreting

interpreting.patch_once()
_spec = importlib.util.spec_from_file_location("conv_harness", pathlib.Path(__file__).with_name("conv_harness.py"))
assert _spec is not None and _spec.loader is not None
harness = importlib.util.module_from_spec(_spec)
sys.modules["conv_harness"] = harness
_spec.loader.exec_module(harness)
Case, conv = harness.Case, harness.conv

# Small programs, so that short rows have whole programs, ragged ones, and several of each.
_SMALL = conv.WalkConfig(tokens=16, block_w=16, unroll=4, num_warps=4)
conv._FORWARD = conv._BACKWARD = {4: _SMALL, 8: _SMALL}
conv._SUM_ROWS = 2

ERROR_CASES = {
    "plain": Case(fragments=(40,)),
    **{f"width_{width}": Case(fragments=(35,), W=16, width=width) for width in (2, 3, 5, 6, 7, 8)},
    "float16": Case(fragments=(36,), W=20, dtype=torch.float16),
    "float16_rows_float32_parameters": Case(
        fragments=(35,), W=16, dtype=torch.float16, parameter_dtype=torch.float32, history=True
    ),
    "no_bias": Case(fragments=(35,), W=16, bias=False),
    "no_activation": Case(fragments=(35,), W=16, silu=False),
    "no_activation_no_bias_history": Case(fragments=(20, 3), W=16, silu=False, bias=False, history=True),
    "documents_empty_and_of_one_token": Case(fragments=(0, 1, 0, 18, 2, 1, 1, 0), W=16),
    "tokens_past_the_end": Case(fragments=(18, 1), W=16, unused=19),
    "int64_boundaries": Case(fragments=(3, 20), W=16, index_dtype=torch.int64),
    "history": Case(fragments=(36, 5), W=16, history=True),
    "history_of_short_fragments": Case(fragments=(1, 2, 0, 9, 3, 8), W=16, width=8, history=True),
    "history_and_tokens_past_the_end": Case(fragments=(6, 11), W=16, width=5, unused=3, history=True),
    "row_in_a_wider_row": Case(fragments=(40,), W=20, rows="wider"),
    "every_second_token": Case(fragments=(40, 7), W=16, rows="sliced", history=True),
}


def strides_change_no_bit() -> bool:
    results = []
    for rows in ("dense", "wider", "sliced"):
        case = Case(fragments=(30, 7), W=16, rows=rows, history=True)
        results.append(harness.run(case, harness.make(case)))
    return all(harness.same(results[0], other) for other in results[1:])


def document_alone_as_in_pack() -> bool:
    """Bits of a document where programs lie wholly in it and where they do not, and at another place in the pack."""
    case = Case(fragments=(5, 60, 9), W=16)
    made = harness.make(case)
    together = harness.run(case, made)
    alone = Case(fragments=(60,), W=16)
    part = slice(5, 65)
    cut = made | {"dy": made["dy"][part], "x": made["x"][part]}
    cut |= {"cu_seqlens": torch.tensor([0, 60], dtype=torch.int32), "used": torch.tensor([0])}
    single = harness.run(alone, cut)
    return all(torch.equal(together[n][part], single[n]) for n in ("y", "dx")) and torch.equal(
        together["dhistory"][1], single["dhistory"][0]
    )


def nan_stays_in_its_document() -> bool:
    case = Case(fragments=(18, 21, 20), W=16, unused=3)
    clean = harness.run(case, harness.make(case))
    for value in (float("nan"), float("inf")):
        made = harness.make(case)
        made["x"][18:39] = made["dy"][18:39] = value
        made["x"][59:] = made["dy"][59:] = value
        dirty = harness.run(case, made)
        for part in (slice(0, 18), slice(39, None)):
            if not all(torch.equal(clean[n][part], dirty[n][part]) for n in ("y", "dx")):
                return False
        if not all(torch.equal(clean["dhistory"][f], dirty["dhistory"][f]) for f in (0, 2)):
            return False
    return True


def tokens_past_the_end_reach_nothing() -> bool:
    case = Case(fragments=(18,), W=16, unused=20)
    clean = harness.run(case, harness.make(case))
    made = harness.make(case)
    made["x"][18:] = made["dy"][18:] = float("nan")
    dirty = harness.run(case, made)
    return harness.same(clean, dirty) and not dirty["y"][18:].any() and not dirty["dx"][18:].any()


def broken_boundaries_stay_in_memory() -> bool:
    """Decreasing, negative and too large boundaries: a wrong result, but every place is in range."""
    case = Case(fragments=(20, 20), W=16)
    for bounds in ([0, 30, 20], [0, -5, 40], [7, 20, 900], [-9, 50, 3]):
        table = conv._token_table(torch.tensor(bounds, dtype=torch.int32), case.num_tokens)
        position, fragment, remaining = table
        token = torch.arange(case.num_tokens)
        fine = (position >= -1) & (position <= token) & (fragment >= 0) & (fragment < 2)
        if not bool((fine & (remaining >= 0) & (token + remaining < case.num_tokens)).all()):
            return False
    return True


def no_tokens() -> bool:
    case = Case(fragments=(0, 0), W=16, history=True)
    got = harness.run(case, harness.make(case))
    return all(not got[n].any() for n in ("dweight", "dbias", "dhistory")) and got["y"].shape == (0, 16)


CHECKS = (
    strides_change_no_bit, document_alone_as_in_pack, nan_stays_in_its_document, tokens_past_the_end_reach_nothing,
    broken_boundaries_stay_in_memory, no_tokens,
)  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, case in ERROR_CASES.items():
        line = {"name": name, "dtype": str(case.dtype).removeprefix("torch."), "errors": harness.errors(case)}
        print(json.dumps(line), flush=True)
    for check in CHECKS:
        print(json.dumps({"name": check.__name__, "passed": check()}), flush=True)
