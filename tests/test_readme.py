"""What README shows is run as it stands."""

import re
from pathlib import Path

import pytest
import torch

import gdn_ops

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def _names() -> dict[str, object]:
    """What the blocks take for given, at the sizes that they name."""
    torch.manual_seed(0)
    return {
        "x": torch.randn(1, 70, 16),
        "w_qkv": (torch.randn(16, (2 * 16 + 48) * 128) / 4).requires_grad_(),
        "g": -torch.rand(1, 70, 48),
        "beta": torch.rand(1, 70, 48),
        "cu_seqlens": torch.tensor([0, 30, 70]),
    }


@pytest.mark.slow
def test_python_blocks_run_in_order_and_pack():
    compiled, eager, report = BLOCKS
    names = _names()
    exec(compiled, names)
    before = gdn_ops.stats()
    names["gdn_layer"](names["x"], names["w_qkv"], names["g"], names["beta"]).sum().backward()
    after = gdn_ops.stats()
    assert after.packed_gradients == before.packed_gradients + 1

    exec(eager, names)
    names["o"].sum().backward()
    assert gdn_ops.stats().packed_gradients == after.packed_gradients + 1
    assert gdn_ops.stats().concatenations == before.concatenations
    assert names["state"] is None

    names["model"], names["inputs"] = names["gdn_layer"], (names["x"], names["w_qkv"], names["g"], names["beta"])
    exec(report, names)


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_named_tests_and_modules_exist():
    for path in set(re.findall(r"`((?:tests|gdn_ops|inductor_passes|docs)/[\w/.]+)`", README)):
        assert (ROOT / path).exists(), path
