"""The benchmark command: its formulas, its gate, and a whole run on a tiny case."""

import json

import pytest
import torch

import gdn_ops
from gdn_ops.bench import __main__ as command
from gdn_ops.bench import accuracy, cases, gate, measure, providers, report, scopes

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

    def scaled_queries(case, data, q, k, v):
        return right.call(case, data, q, k, v) + (q - q.detach()).mean()

    wrong = providers.Provider("ours", wrong_call)
    assert "o: relative RMS" in gate.check(tiny, wrong, "cpu")
    # The output is right to the bit; one gradient is not.
    assert "dq: relative RMS" in gate.check(tiny, providers.Provider("ours", scaled_queries), "cpu")
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
    fla = [x for x in found["skipped"] if x["provider"] == "fla" and x["failed"]]
    if fla:
        assert code == 1
        assert "not importable" in fla[0]["reason"]
    assert found["header"]["torch"] == torch.__version__
    assert found["command"].startswith("python -m gdn_ops.bench --device cpu")
    assert chart.stat().st_size > 1000
    said = capsys.readouterr()
    assert "floor/step" in said.out
    started = said.err.splitlines()
    assert "checking tiny ours ..." in started
    for line in [line for line in said.out.splitlines() if line.startswith("measured tiny ")]:
        assert f"measuring {line.removeprefix('measured ')} ..." in started
    assert sum(line.startswith("measuring tiny ours ") for line in started) == len(ours)


def test_one_failing_provider_does_not_lose_the_others(tiny, monkeypatch, tmp_path, capsys):
    right = providers.provider("ours", tiny)

    def provider(name, case):
        return right if name == "ours" else providers.Provider(name, lambda *_: {}["kernel"])

    monkeypatch.setattr(command, "provider", provider)
    target = tmp_path / "out.json"
    argv = ["--device", "cpu", "--case", "tiny", "--provider", "fla,ours", "--repeats", "2", "--json", str(target)]
    assert command.main(argv) == 1
    found = json.loads(target.read_text())
    assert [r["provider"] for r in found["results"]] == ["ours"]
    assert found["skipped"][0]["reason"] == "gate failed: KeyError: 'kernel'"
    assert "KeyError" in capsys.readouterr().err


def test_triton_s_own_errors_are_reported_and_the_run_goes_on(tiny, monkeypatch, tmp_path, capsys):
    errors = pytest.importorskip("triton.runtime.errors")
    compilation = pytest.importorskip("triton.compiler.errors").CompilationError
    raised = iter([errors.OutOfResources(240000, 232448, "shared memory"), errors.PTXASError("ptxas failed")])
    right = providers.provider("ours", tiny)

    def fails(*_):
        raise next(raised)

    def provider(name, case):
        return right if name == "ours" else providers.Provider(name, fails)

    monkeypatch.setattr(command, "provider", provider)
    target = tmp_path / "out.json"
    argv = ["--device", "cpu", "--case", "tiny", "--provider", "fla,qla,ours", "--repeats", "2", "--json", str(target)]
    assert command.main(argv) == 1
    found = json.loads(target.read_text())
    assert [r["provider"] for r in found["results"]] == ["ours"]
    assert [x["reason"].partition(":")[2].split(":")[0] for x in found["skipped"]] == [" OutOfResources", " PTXASError"]
    assert issubclass(compilation, providers.FAILURES)
    assert "OutOfResources" in capsys.readouterr().err


def test_a_line_that_only_this_package_has_is_no_failure(tiny, monkeypatch):
    transformers = pytest.importorskip("transformers")
    assert transformers
    dense = cases.Case("tiny", 1, 2, 70, head_dim=8, dtype=torch.float32)
    monkeypatch.setitem(cases.CASES, "tiny", dense)
    argv = "--device cpu --case tiny --provider transformers --form plain,packed --repeats 2"
    assert command.main(argv.split()) == 0


def test_gates_only_measures_nothing_and_writes_the_gates(tiny, monkeypatch, tmp_path, capsys):
    right, wrong = providers.provider("ours", tiny), providers.Provider("fla", lambda *_: {}["kernel"])
    monkeypatch.setattr(command, "provider", lambda name, case: right if name == "ours" else wrong)
    target = tmp_path / "gates.json"
    argv = ["--device", "cpu", "--case", "tiny", "--gates-only", "--json", str(target)]
    assert command.main(argv) == 0
    text = capsys.readouterr().out
    assert "gate tiny ours: green" in text
    assert "step ms" not in text
    found = json.loads(target.read_text())
    assert found["gates"] == [{"case": "tiny", "provider": "ours", "reason": None}]
    assert found["header"]["torch"] == torch.__version__
    assert command.main([*argv, "--provider", "ours,fla"]) == 1
    assert "gate tiny fla: failed: KeyError" in capsys.readouterr().out
    found = json.loads(target.read_text())
    assert [x["reason"] for x in found["gates"]] == [None, "gate failed: KeyError: 'kernel'"]
    assert found["results"] == found["skipped"] == []


@pytest.mark.parametrize("kind", accuracy.INPUTS)
def test_accuracy_of_every_kind_of_inputs(kind):
    case = cases.Case("tiny", 1, 2, 130, (65, 1, 64), head_dim=16, dtype=torch.float32)
    ours = providers.provider("ours", case)
    found = accuracy.errors(kind, ours, "cpu", case)
    for values in (found.relative_rms, found.largest):
        assert list(values) == ["o", "dq", "dk", "dv", "dg", "dbeta"]
        assert all(0 < x < 1e-4 for x in values.values())
    wrong = accuracy.errors(kind, providers.Provider("wrong", lambda *xs: 1.01 * ours.call(*xs)), "cpu", case)
    assert wrong.relative_rms["dk"] == pytest.approx(1e-2, rel=0.1)
    assert wrong.largest["dk"] == pytest.approx(1e-2, rel=0.1)


def test_accuracy_command(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(accuracy, "CASE", TINY)
    target = tmp_path / "accuracy.json"
    assert command.main(["--device", "cpu", "--accuracy", "--json", str(target)]) == 0
    text, said = capsys.readouterr()
    assert "step ms" not in text
    assert all(kind in text for kind in accuracy.INPUTS)
    assert all(f"running {kind} ours ..." in said for kind in accuracy.INPUTS)
    assert len(json.loads(target.read_text())["accuracy"]) == len(accuracy.INPUTS)


def test_lines_of_a_plan():
    plan = command.Plan(("main",), ("ours",), ("kernel", "row", "block"), ("plain", "packed"), command.MODES)
    lines = plan.lines()
    assert len(lines) == len(set(lines)) == 1 + (5 + 4) + 2
    assert ("row", "packed", "compiled-no-pass") not in lines
    for plans in command.PLANS.values():
        for plan in plans:
            assert set(plan.cases) <= set(cases.CASES)
            assert set(plan.providers) <= set(providers.NAMES)
            assert plan.lines()


def test_cost_table_sets_plain_against_packed():
    def line(form, mode, ms):
        one, two = measure.Timing(ms, ms, ms), measure.Timing(2 * ms, 2 * ms, 2 * ms)
        return report.Result("main", "ours", "row", form, mode, one, two, measure.Timing(3 * ms, 0, 0), 0, None, None)

    assert report.cost_table([line("plain", "eager", 1.0)]) is None
    lines = [line("plain", "eager", 1.5), line("packed", "eager", 1.0), line("packed", "compiled", 1.0)]
    lines += [line("plain", "compiled-no-pass", 2.0), line("plain", "checkpointed", 3.0)]
    lines += [line("packed", "checkpointed", 2.0)]
    found = [" ".join(x.split()) for x in report.cost_table(lines).splitlines()]
    assert found == [
        "case run what plain ms packed ms plain/packed",
        "main eager forward 1.500 1.000 1.500",
        "main eager backward 3.000 2.000 1.500",
        "main eager step 4.500 3.000 1.500",
        "main eager checkpointed step 9.000 6.000 1.500",
        "main compiled, pass off forward 2.000 1.000 2.000",
        "main compiled, pass off backward 4.000 2.000 2.000",
        "main compiled, pass off step 6.000 3.000 2.000",
    ]


@pytest.mark.slow
def test_compiled_lines_really_compile_each_time(tiny, monkeypatch):
    started = []
    compiled = torch.compile

    def counted(run, **options):
        started.append(options["fullgraph"])
        return compiled(run, **options)

    monkeypatch.setattr(torch, "compile", counted)
    data = cases.make_data(tiny, "cpu")
    ours = providers.provider("ours", tiny)
    gradients = []
    for form, packed_pass in (("plain", True), ("plain", False), ("packed", True)):
        prepared = scopes.row(tiny, data, ours, form, compiled=True, recompute=False, packed_pass=packed_pass)
        gdn_ops.reset_stats()
        prepared.step()
        stats = gdn_ops.stats()
        gradients.append((prepared.gradients()[0], stats.packed_gradients))
    assert started == [True] * 3
    assert [count for _, count in gradients] == [1, 0, 1]
    assert all(torch.equal(gradient, gradients[0][0]) for gradient, _ in gradients)


@pytest.mark.gpu
def test_command_on_a_gpu(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    target = tmp_path / "out.json"
    assert command.main(["--case", "small", "--form", "packed", "--quick", "--graph", "--json", str(target)]) == 0
    (found,) = json.loads(target.read_text())["results"]
    assert found["graph"]["median"] > 0
    row = cases.make_data(cases.CASES["small"], "cuda").row
    assert found["peak_bytes"] > row.nbytes  # at least the row's gradient


def test_unknown_words_are_refused(capsys):
    with pytest.raises(SystemExit):
        command.parser().parse_args(["--case", "main,huge"])
    assert "unknown ['huge']" in capsys.readouterr().err


REFUSED = [
    ("--gates-only --chart out.png", "--chart: not used with --gates-only, which measures nothing"),
    ("--accuracy --chart out.png", "--chart: not used with --accuracy, which has its own inputs"),
    ("--accuracy --case cpu --graph", "--case, --graph: not used with --accuracy"),
    *[(f"--accuracy {x}", f"{x.split()[0]}: not used with --accuracy") for x in ("--scope row", "--form plain")],
    *[(f"--accuracy {x}", f"{x.split()[0]}: not used with --accuracy") for x in ("--mode eager", "--set cost")],
    *[(f"--accuracy {x}", f"{x.split()[0]}: not used with --accuracy") for x in ("--repeats 20", "--warmup 0")],
    ("--accuracy --quick", "--quick: not used with --accuracy"),
    ("--accuracy --gates-only", "--gates-only: not used with --accuracy"),
    ("--set cost --case main --provider fla", "--case, --provider: not used with --set, which names them itself"),
    ("--quick --repeats 9", "--repeats: not used with --quick, which stands for both"),
    ("--json missing/out.json", "--json: expected a file in a folder that exists, got missing/out.json"),
    ("--chart missing/out.png", "--chart: expected a file in a folder that exists, got missing/out.png"),
    ("--json .", "--json: expected a file in a folder that exists, got ."),
    ("--chart out.tex", "--chart: expected a name that ends in .png or .svg, got out.tex"),
    ("--repeats 0", "argument --repeats: expected at least 1, got 0"),
    ("--repeats -2", "argument --repeats: expected at least 1, got -2"),
    ("--repeats many", "argument --repeats: invalid number value: 'many'"),
    ("--warmup -1", "argument --warmup: expected at least 0, got -1"),
    ("--graph", "--graph: times CUDA graphs, and the device is cpu"),
]


@pytest.mark.parametrize(("argv", "message"), REFUSED, ids=[argv for argv, _ in REFUSED])
def test_what_would_be_ignored_or_fail_late_is_refused_at_once(argv, message, monkeypatch, tmp_path, capsys):
    def never(*_):
        raise AssertionError("the run has begun")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "header", never)
    with pytest.raises(SystemExit) as end:
        command.main(["--device", "cpu", *argv.split()])
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"python -m gdn_ops.bench: error: {message}")


def test_a_device_and_a_package_that_are_not_there_are_said_at_once(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    for argv, message in (
        (["--device", "cuda"], "--device: cuda needs a CUDA device, and torch sees none"),
        (["--chart", "out.png"], "--chart: needs matplotlib, which is not installed"),
    ):
        with pytest.raises(SystemExit):
            command.main(argv)
        assert capsys.readouterr().err.splitlines()[-1] == f"python -m gdn_ops.bench: error: {message}"


def test_what_is_measured_by_default(monkeypatch):
    found = command.arguments(["--device", "cpu"])
    assert (found.case, found.provider, found.scope, found.form, found.mode) == (
        *(["cpu"], ["ours"], ["row"], ["plain"], ["eager"]),
    )
    assert (found.repeats, found.warmup) == (20, 3)
    found = command.arguments(["--device", "cpu", "--quick"])
    assert (found.repeats, found.warmup) == (5, 1)
    assert command.arguments(["--device", "cpu", "--warmup", "0"]).warmup == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert command.arguments([]).case == ["main"]


def test_header_names_device_versions_and_commit():
    assert report.header("cpu").keys() == {"date", "device", "gdn_ops", "commit", "torch", "triton", "python"}
