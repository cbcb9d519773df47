"""What a compilation says about itself."""

import inspect
import logging

import pytest
import torch
from expecttest import assert_expected_inline

import inductor_passes
from inductor_passes.report import REASONS, CallReport, Report
from tests.inductor_passes.spellings import HV, QW, VW, WIDTH, heads, parts
from tests.inductor_passes.toy_attention import toy


def leaves():
    torch.manual_seed(0)
    return torch.randn(2, 6, 16, requires_grad=True), torch.randn(16, WIDTH, requires_grad=True), torch.randn(2, 6, HV)


def packed(x, w, g):
    q, k, v = heads(*parts(x @ w))
    return toy(q, k, v, g)  # the line that reports point at


def mixed(x, w, g):
    a = toy(*heads(*parts(x @ w)), g)
    b = toy(*heads(*(y.exp() for y in parts(x @ w))), g)
    return a + b


def test_explain_says_where_and_how_much():
    report = inductor_passes.explain(packed, *leaves())
    (call,) = report.calls
    assert (call.op, call.packed, call.reason, call.operands) == ("toy::attention", True, "packed", ("q", "k", "v"))
    lines, first = inspect.getsourcelines(packed)
    line = first + next(i for i, text in enumerate(lines) if "reports point at" in text)
    assert call.location == f"{__file__}:{line}"
    assert call.saved_bytes == 2 * 2 * 6 * (2 * QW + VW) * 4
    assert report.saved_bytes == call.saved_bytes


def test_explain_takes_compiled_functions_and_modules():
    module = torch.nn.Module()
    module.forward = lambda x, w, g: packed(x, w, g)
    for function in (torch.compile(packed), torch.compile(module), module):
        assert inductor_passes.explain(function, *leaves()).packed == 1


def test_explain_leaves_gradients_and_settings_alone():
    x, w, g = leaves()
    with inductor_passes.configured(strict=True):
        inductor_passes.explain(mixed, x, w, g)
    assert x.grad is None
    assert w.grad is None


def partly(x, w, g):
    q, k, v = heads(*parts(x @ w))
    return toy(q * 2, k, v, g)


def test_a_call_packed_in_part_is_not_packed():
    """The report names the operand, and strict mode refuses the call."""
    (call,) = inductor_passes.explain(partly, *leaves()).calls
    assert not call.packed
    assert call.packed_partly
    assert (call.reason, call.operands, call.copied) == ("packed_partly", ("k", "v"), ("q",))
    assert "the gradient of q " in call.detail
    with pytest.raises(inductor_passes.UnpackedCallError, match="the gradient of q "):
        inductor_passes.explain(partly, *leaves(), strict=True)


def test_explain_sees_every_call_however_often_and_however_it_was_compiled():
    class Layer(torch.nn.Module):
        def forward(self, *inputs):
            return packed(*inputs)

    compiled, replaced = Layer(), Layer()
    compiled.compile()
    replaced.forward = torch.compile(replaced.forward)
    for function in (compiled, replaced, *[packed] * 10):
        assert len(inductor_passes.explain(function, *leaves())) == 1


@pytest.mark.parametrize("thing", [3, None, "model", torch.ones(2)])
def test_explain_names_what_cannot_be_called(thing):
    with pytest.raises(TypeError, match=f"model must be a module or a function, got {type(thing).__name__}"):
        inductor_passes.explain(thing, torch.ones(2))


def test_explain_strict_wants_a_call():
    with pytest.raises(inductor_passes.UnpackedCallError, match="no registered op"):
        inductor_passes.explain(lambda x: x + 1, torch.ones(2), strict=True)


def test_explain_strict_names_the_calls_left():
    with pytest.raises(inductor_passes.UnpackedCallError, match="1 call") as caught:
        inductor_passes.explain(mixed, *leaves(), strict=True)
    assert "computed_between" in str(caught.value)
    assert "test_report.py:" in str(caught.value)


def test_table():
    report = Report(
        (
            CallReport(
                "toy::attention",
                True,
                "packed",
                location="model.py:10",
                saved_bytes=3 * 1024 * 1024,
                operands=("q", "k", "v"),
                grouped_heads=True,
                rows_made=1,
            ),
            CallReport("toy::attention", False, "split_elsewhere", "the split is in another graph", "model.py:20"),
            CallReport(
                "toy::attention",
                False,
                "packed_partly",
                "the gradient of q is also used by aten.sum (sum_1)",
                "model.py:30",
                saved_bytes=2048,
                operands=("k", "v"),
                copied=("q",),
            ),
        )
    )
    assert (report.packed, report.packed_partly) == (1, 1)
    assert_expected_inline(
        str(report),
        """\
call            packed  saved  reason           where        detail
toy::attention  yes     3 MiB  packed           model.py:10  heads grouped; 1 made dense before the call
toy::attention  no      -      split_elsewhere  model.py:20  the split is in another graph
toy::attention  k,v     2 KiB  packed_partly    model.py:30  the gradient of q is also used by aten.sum (sum_1)
1 of 3 packed (1 more in part), 3.002 MiB of gradient copies saved""",
    )
    assert str(Report()) == "no registered op in the graph"


def test_every_reason_is_documented():
    docs = (inspect.getfile(inductor_passes).rsplit("/inductor_passes/", 1)[0]) + "/docs/passes.md"
    with open(docs, encoding="utf-8") as file:
        text = file.read()
    for code in REASONS:
        assert f"| `{code}` |" in text, code


def test_compilation_logs_the_table_and_the_graphs(caplog):
    torch._dynamo.reset()
    from inductor_passes import manager

    graph_report = Report((CallReport("toy::attention", True, "packed", operands=("q",)),))
    with caplog.at_level(logging.INFO, "inductor_passes"):
        manager.publish(graph_report)
    assert caplog.records[-1].getMessage() == str(graph_report)
    with caplog.at_level(logging.DEBUG, "inductor_passes"):
        inductor_passes.explain(packed, *leaves())
    texts = [record.getMessage() for record in caplog.records]
    assert any(text.startswith("graph before the passes") and "attention_bwd" in text for text in texts)
    assert any(text.startswith("graph after the passes") and "attention_bwd_row" in text for text in texts)


def test_variants_are_checked_when_they_are_registered():
    with pytest.raises(ValueError, match="operands and gradients must be of one length"):
        inductor_passes.PackedVariant("a::f", "a::b", "a::r", operands=("q",))
    with pytest.raises(ValueError, match="'w' is not one of the operands"):
        inductor_passes.PackedVariant("a::f", "a::b", "a::r", grouped_operands=("w",))
    with pytest.raises(ValueError, match="must read 'namespace::name', got 'f'"):
        inductor_passes.PackedVariant("f", "a::b", "a::r")
    with pytest.raises(ValueError, match="another packed variant already"):
        inductor_passes.register(inductor_passes.PackedVariant("toy::attention", "a::b", "a::r"))
