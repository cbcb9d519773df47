"""The pages name what the code has: every op and option, every setting, every public name."""

from dataclasses import fields
from pathlib import Path

import pytest

import gdn_ops
import inductor_passes
from gdn_ops import ops, settings
from inductor_passes import settings as pass_settings

DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.mark.parametrize("name", ops.SCHEMAS)
def test_ops_page_has_every_op(name):
    assert f"`{name}`" in (DOCS / "ops.md").read_text()


def test_settings_page_has_every_setting_and_word():
    page = (DOCS / "settings.md").read_text()
    for field in fields(settings.Settings):
        assert f"`GDN_OPS_{field.name.upper()}`" in page
    for word in settings.BACKENDS:
        assert f"`{word}`" in page
    for variable in pass_settings._VARIABLES.values():
        assert f"`{variable}`" in page


@pytest.mark.parametrize("package", [gdn_ops, inductor_passes])
def test_public_names_exist_and_have_docstrings(package):
    for name in package.__all__:
        value = getattr(package, name)
        assert isinstance(value, str) or (value.__doc__ or "").strip(), f"{package.__name__}.{name}"
