"""Settings come from the environment once, are frozen, and refuse unknown words."""

import dataclasses

import pytest

from gdn_ops import settings


def test_defaults_and_environment():
    assert settings.from_environment({}) == settings.Settings("auto", "solve", False, True, True)
    found = settings.from_environment(
        {
            "GDN_OPS_BACKEND": "cpu",
            "GDN_OPS_SAVE": "states",
            "GDN_OPS_DEBUG": "1",
            "GDN_OPS_FAST_CALLS": "0",
            "GDN_OPS_CUT_DOCUMENTS": "0",
            "OTHER": "x",
        }
    )
    assert found == settings.Settings("cpu", "states", True, False, False)


@pytest.mark.parametrize(
    "variables",
    [{"GDN_OPS_BACKEND": "cuda"}, {"GDN_OPS_SAVE": "none"}, {"GDN_OPS_DEBUG": "yes"}, {"GDN_OPS_FAST_CALLS": "2"}],
)
def test_unknown_word_is_refused(variables):
    with pytest.raises(ValueError, match=next(iter(variables.values()))):
        settings.from_environment(variables)


def test_configure_restores_and_settings_are_frozen():
    before = settings.current()
    with settings.configure(save="inputs") as changed:
        assert settings.current() is changed
        assert changed.save == "inputs"
    assert settings.current() is before
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.save = "inputs"
    with pytest.raises(TypeError, match="unknown setting 'unknown'; known: backend, save, debug, "):
        settings.configure(unknown=1).__enter__()
    assert settings.current() is before
