import dataclasses
import importlib.metadata
import importlib.util
import re

import pytest
import torch

from gdn_ops import demo

needs_packages = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("transformers", "tqdm", "matplotlib")),
    reason="the demo's own packages are not installed",
)


@pytest.fixture
def tiny(monkeypatch):
    """One GDN layer, so that the compiles stay short."""
    size = dataclasses.replace(
        demo.SIZES["cpu"], hidden=32, layers=1, attention_heads=2, head_dim=16, batch=2, tokens=80
    )
    monkeypatch.setitem(demo.SIZES, "cpu", size)
    was = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(was[0])
    torch.utils.deterministic.fill_uninitialized_memory = was[1]


@needs_packages
@pytest.mark.slow
def test_demo_runs_and_checks_itself(tiny, tmp_path, capsys):
    plot = tmp_path / "loss.png"
    status = demo.main(["--device", "cpu", "--steps", "3", "--compare", "2", "--repeats", "1", "--plot", str(plot)])
    out = capsys.readouterr().out
    assert status == 0, out
    compared = re.findall(r"^(\d+) +([\d.]+) +([\d.]+) +([-+][\d.e+-]+)$", out, re.MULTILINE)
    assert [step for step, *_ in compared] == ["1", "2"]
    assert all(abs(float(difference)) < 1e-4 for *_, difference in compared)
    assert re.search(r"^GDN calls in the graph +1$", out, re.MULTILINE)
    assert re.search(r"^packed gradients counted in one step +1 +0$", out, re.MULTILINE)
    copied = re.search(r"^operands copied in one step +(\d+) +(\d+)$", out, re.MULTILINE).groups()
    # The model's convolution leaves rows that the op could not read; older transformers repeats heads in front of it.
    assert copied[0] == "0" or tuple(map(int, importlib.metadata.version("transformers").split(".")[:2])) < (5, 24)
    assert int(copied[1]) > 0
    equal, total = re.search(r"^gradients bitwise equal, on and off +(\d+) of (\d+)$", out, re.MULTILINE).groups()
    assert equal == total
    assert int(total) > 10
    assert plot.stat().st_size > 5000


def test_missing_packages_are_named(monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tqdm" else find_spec(name))
    assert demo.main([]) == 2
    assert capsys.readouterr().err == "gdn_ops.demo needs tqdm: pip install 'gdn-ops[demo]'\n"


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--batch", "-1"], ["--device", "tpu"], ["--step-size", "1"]])
def test_wrong_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        demo.main(arguments)
    assert error.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_text_is_this_pythons_source():
    text = demo.standard_library_text()
    assert b"def " in text
    assert b"import " in text
    assert text == demo.standard_library_text()
    assert demo.standard_library_text(1000) == text[:1000]


def test_batches_pair_each_byte_with_the_next():
    text = bytes(range(200))
    x, y = next(demo._batches(text, 3, 50, 0, torch.device("cpu")))
    assert x.shape == y.shape == (3, 50)
    assert torch.equal(y, x + 1)
    again, _ = next(demo._batches(text, 3, 50, 0, torch.device("cpu")))
    assert torch.equal(x, again)
    with pytest.raises(ValueError, match="tokens: expected fewer than the 200 bytes"):
        next(demo._batches(text, 1, 200, 0, torch.device("cpu")))
