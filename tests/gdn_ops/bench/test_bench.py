"""The benchmark command: its formulas, its gate, and a whole run on a tiny case."""

import json

import pytest
import torch

from gdn_ops.bench import __main__ as command
from gdn_ops.bench import cases, gate, measure, providers, report

TINY = cases.Case("tiny", 1, 2, 70, (40, 0, 30), head_dim=8, dtype=torch.float32)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(cases.CASES, "tiny", TINY)
    monkeypatch.setattr(gate, "reduced", lambda case: case)
    return TINY


def test_work_of_the_main_shape():
    # 32768 tokens, rows of 10240 and outputs of 6144 bf16 elements, g and beta of 48 float32.
    row, out, gates = 32768 * 10240 * 2, 32768 * 6144 * 2, 2 * 32768 * 48 * 4
    found = cases.work(cases.CASES["main"])
    assert found["forward"].bytes == row + out + gates
    assert found["backward"].bytes == 2 * row + out + 2 * gates
    assert cases.CASES["main"].num_chunks == 514
    assert found["forward"].flops == pytest.approx(226e9, rel=0.02)
    assert found["backward"].flops == pytest.approx(640e9, rel=0.02)
    assert found["step"].flops == found["forward"].flops + found["backward"].flops


@pytest.mark.parametrize("case", cases.CASES.values(), ids=list(cases.CASES))
def test_cases_are_consistent(case):
    if case.documents is not None:
        assert sum(case.documents) == case.tokens
        assert case.batch == 1
    assert case.num_v_heads % case.num_qk_heads == 0
    small = cases.reduced(case)
    assert small.total_tokens <= 400 * case.batch
    assert (small.num_qk_heads, small.head_dim, small.dtype) == (case.num_qk_heads, case.head_dim, case.dtype)


def test_summary_is_median_and_spread():
    assert measure.summarise([5.0, 1.0, 3.0, 2.0, 4.0, 100.0]) == measure.Timing(3.5, 2.0, 5.0)


def test_gate_is_green_for_the_right_result_and_red_for_a_wrong_one(tiny):
    right = providers.provider("ours", tiny)
    assert gate.check(tiny, right, "cpu") is None

    def wrong_call(case, data, q, k, v):
        return right.call(case, data, q, k, v) + 0.001

    wrong = providers.Provider("ours", wrong_call)
    assert "o: relative RMS" in gate.check(tiny, wrong, "cpu")
    broken = providers.Provider("ours", lambda case, data, q, k, v: right.call(case, data, q, k, v) * float("nan"))
    assert "nan" in gate.check(tiny, broken, "cpu")


def test_a_red_gate_prints_no_figure(tiny, monkeypatch, capsys):
    monkeypatch.setattr(gate, "check", lambda *_: "o: wrong")
    assert command.main(["--device", "cpu", "--case", "tiny"]) == 1
    text = capsys.readouterr().out
    assert "RED: o: wrong" in text
    assert "step ms" not in text


def test_command_measures_every_form_and_writes_json_and_chart(tiny, tmp_path, capsys):
    matplotlib = pytest.importorskip("matplotlib")
    assert matplotlib
    target, chart = tmp_path / "out.json", tmp_path / "out.png"
    argv = "--device cpu --case tiny --provider ours,fla --scope kernel,row --form plain,packed,views,contiguous"
    code = command.main(
        [*argv.split(), "--mode", "eager,checkpointed", "--repeats", "2", "--warmup", "1"]
        + ["--json", str(target), "--chart", str(chart)]
    )
    found = json.loads(target.read_text())
    ours = [r for r in found["results"] if r["provider"] == "ours"]
    assert len(ours) == 1 + 4 * 2
    assert all(0 < r["step"]["low"] <= r["step"]["median"] <= r["step"]["high"] for r in ours)
    fla = [x for x in found["skipped"] if x["provider"] == "fla"]
    if fla:
        assert code == 1
        assert "not importable" in fla[0]["reason"]
    assert found["header"]["torch"] == torch.__version__
    assert found["command"].startswith("python -m gdn_ops.bench --device cpu")
    assert chart.stat().st_size > 1000
    assert "floor/step" in capsys.readouterr().out


def test_unknown_words_are_refused(capsys):
    with pytest.raises(SystemExit):
        command.parser().parse_args(["--case", "main,huge"])
    assert "unknown ['huge']" in capsys.readouterr().err


def test_header_names_device_versions_and_commit():
    assert report.header("cpu").keys() == {"date", "device", "gdn_ops", "commit", "torch", "triton", "python"}
