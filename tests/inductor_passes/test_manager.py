"""The manager in Inductor's configuration: installation, chaining, cache keys, switches, the dropped-pass message."""

import copy
import dataclasses
import logging
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

import inductor_passes
from inductor_passes import manager, registry
from inductor_passes.settings import Settings, current, read_settings
from tests.inductor_passes.spellings import SPELLINGS, Layer, make_input, train_step
from tests.inductor_passes.toy_attention import VARIANT

ROOT = Path(__file__).resolve().parents[2]
SLICING = SPELLINGS["slicing"]


@pytest.fixture(autouse=True)
def _installed():
    """Start from an installed manager and fresh compilations; leave no setting behind."""
    inductor_passes.install()
    torch._dynamo.reset()
    with inductor_config.patch(joint_custom_pre_pass=manager.manager, joint_custom_post_pass=manager.watch):
        yield


class Mine(CustomGraphPass):
    """A user's own pass that only counts its calls."""

    def __init__(self, name="mine"):
        self.name, self.calls = name, 0

    def __call__(self, graph):
        self.calls += 1

    def uuid(self):
        return self.name


def train(*, seed=0, **compile_options):
    torch.manual_seed(seed)
    layer = Layer(SLICING)
    before = inductor_passes.counters["packed"]
    caches_off = {"fx_graph_cache": False}, {"enable_autograd_cache": False}
    with inductor_config.patch(caches_off[0]), torch._functorch.config.patch(caches_off[1]):
        results = train_step(torch.compile(layer, **compile_options), layer, make_input(SLICING))
    return results, inductor_passes.counters["packed"] - before


def test_plain_compile_packs_and_gives_the_same_bits():
    on, packed = train()
    assert packed == 1
    torch._dynamo.reset()
    with inductor_passes.disabled():
        off, packed = train()
    assert packed == 0
    for a, b in zip(off, on, strict=True):
        assert torch.equal(a, b)


def test_users_pass_set_before_keeps_its_place():
    mine = Mine()
    with inductor_config.patch(joint_custom_pre_pass=mine):
        manager.attach(inductor_config)
        chained = inductor_config.joint_custom_pre_pass
        assert chained.passes == (mine, manager.manager)
        manager.attach(inductor_config)
        assert inductor_config.joint_custom_pre_pass is chained, "attaching twice adds nothing"
        assert train()[1] == 1
    assert mine.calls == 1


def test_users_list_of_passes_is_chained():
    first, second = Mine("first"), Mine("second")
    with inductor_config.patch(joint_custom_pre_pass=[first, second]):
        manager.attach(inductor_config)
        assert inductor_config.joint_custom_pre_pass.passes == (first, second, manager.manager)


def seen_by(log, slot):
    """A pass of the user's that notes which backward op it finds."""

    def look(graph):
        names = {str(node.target) for node in graph.nodes}
        log.append((slot, [name for name in ("attention_bwd", "attention_bwd_row") if f"toy.{name}.default" in names]))

    return look


class Cacheable(CustomGraphPass):
    """The same as a pass with an identity."""

    def __init__(self, log, slot):
        self.look, self.slot = seen_by(log, slot), slot

    def __call__(self, graph):
        self.look(graph)

    def uuid(self):
        return self.slot


@pytest.mark.parametrize("kind", ["functions", "passes with uuid", "lists"])
def test_users_passes_in_every_slot_run_in_a_fixed_order(kind):
    log = []
    make = Cacheable if kind == "passes with uuid" else seen_by
    slots = ["joint_custom_pre_pass", "joint_custom_post_pass", "post_grad_custom_pre_pass",
             "post_grad_custom_post_pass"]  # fmt: skip
    passes = {slot: make(log, slot) for slot in slots}
    passes["pre_grad_custom_pass"] = seen_by(log, "pre_grad_custom_pass")
    if kind == "lists":  # torch 2.11 takes none, but the two slots that are chained do
        for slot in slots[:2]:
            passes[slot] = [Cacheable(log, slot), seen_by(log, slot)]
    with inductor_config.patch(passes):
        manager.attach(inductor_config)
        assert train()[1] == 1
    times = 2 if kind == "lists" else 1
    dense, row = ["attention_bwd"], ["attention_bwd_row"]
    expected = [("pre_grad_custom_pass", [])]
    expected += [("joint_custom_pre_pass", dense)] * times + [("joint_custom_post_pass", row)] * times
    for graph in ([], row):  # the forward's graph and the backward's
        expected += [("post_grad_custom_pre_pass", graph), ("post_grad_custom_post_pass", graph)]
    assert log == expected, "the user's passes first, then this package's, then the later slots"


def test_dropped_pass_is_said_once_with_the_remedy(caplog):
    mine = Mine()
    watch = manager.Watch()
    with inductor_config.patch(joint_custom_post_pass=watch), caplog.at_level(logging.WARNING, "inductor_passes"):
        _, packed = train(options={"joint_custom_pre_pass": mine})
        torch._dynamo.reset()
        train(options={"joint_custom_pre_pass": mine})
    assert packed == 0
    assert mine.calls == 2
    (record,) = caplog.records
    assert "toy::attention" in record.getMessage()
    assert "inductor_passes.manager.chain(your_pass)" in record.getMessage()


def test_the_remedy_works(caplog):
    mine = Mine()
    with caplog.at_level(logging.WARNING, "inductor_passes"):
        assert train(options={"joint_custom_pre_pass": manager.chain(mine)})[1] == 1
    assert mine.calls == 1
    assert not caplog.records


def test_gdn_backend_composes_with_options_and_mode():
    mine = Mine()
    _, packed = train(backend="gdn", options={"joint_custom_pre_pass": mine, "epilogue-fusion": False})
    assert (packed, mine.calls) == (1, 1)
    torch._dynamo.reset()
    assert train(backend="gdn", mode="max-autotune-no-cudagraphs")[1] == 1


def test_compilation_in_another_thread_packs():
    # torch keeps configuration in context variables: what one thread sets, another does not see.
    packed = []

    def work():
        with inductor_config.patch(fx_graph_cache=False):
            packed.append(train(seed=1)[1])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert packed == [1]


def test_disabled_holds_in_its_thread_only():
    seen = []
    with inductor_passes.disabled():
        thread = threading.Thread(target=lambda: seen.append(current().enabled))
        thread.start()
        thread.join()
        assert not current().enabled
    assert seen == [True]
    assert current().enabled


def test_disable_and_enable_hold_for_the_process():
    inductor_passes.disable()
    try:
        assert train()[1] == 0
    finally:
        inductor_passes.enable()
    torch._dynamo.reset()
    assert train()[1] == 1


def test_strict_raises():
    torch.manual_seed(0)
    layer = Layer(SPELLINGS["silu_after"])
    compiled = torch.compile(layer)
    with inductor_passes.configured(strict=True), pytest.raises(Exception, match="strict mode: 1 call") as caught:
        train_step(compiled, layer, make_input(SPELLINGS["silu_after"]))
    assert "computed_between" in str(caught.value)


def test_uuid_covers_settings_ops_and_formulas():
    base = manager.manager.uuid()
    assert base == manager.manager.uuid()
    with inductor_passes.configured(grouped_heads=False):
        assert manager.manager.uuid() != base
    with inductor_passes.disabled():
        assert manager.manager.uuid() != base, "formulas count with the passes off, too"
    registry.unregister(VARIANT)
    try:
        without = manager.manager.uuid()
        upgraded = registry.register(dataclasses.replace(VARIANT, fingerprint="2"))
        assert len({repr(base), repr(without), repr(manager.manager.uuid())}) == 3
        registry.unregister(upgraded)
    finally:
        registry.register(VARIANT)
    assert manager.manager.uuid() == base


def test_chain_is_cacheable_only_if_every_member_is():
    assert manager.chain(Mine()).uuid() == ("chain", "mine", manager.manager.uuid())
    assert manager.chain(lambda graph: None).uuid() is None


def test_manager_stays_one_object():
    for one in (manager.manager, manager.watch):
        assert copy.deepcopy(one) is one
        assert copy.copy(one) is one
        assert pickle.loads(pickle.dumps(one)) is one
        assert "0x" not in repr(one)


def test_settings_are_read_from_the_environment():
    assert read_settings({}) == Settings()
    found = read_settings({"INDUCTOR_PASSES": "0", "INDUCTOR_PASSES_STRICT": "on", "INDUCTOR_PASSES_FOLD_NORM": ""})
    assert found == Settings(enabled=False, strict=True)
    with pytest.raises(ValueError, match="INDUCTOR_PASSES_STRICT must be one of .* got 'maybe'"):
        read_settings({"INDUCTOR_PASSES_STRICT": "maybe"})


def test_unknown_setting_is_refused():
    with pytest.raises(TypeError, match="unknown setting 'gruop'"):
        inductor_passes.configure(gruop=True)
    with pytest.raises(TypeError, match="must be a bool"), inductor_passes.configured(strict=1):
        pass


def test_replaced_slot_is_said_when_a_cache_is_asked(caplog):
    """What is left to say on a cache hit, where no pass runs."""
    watch = manager.Watch()
    with caplog.at_level(logging.INFO, "inductor_passes"):
        watch.uuid()
        assert not caplog.records
        with inductor_config.patch(joint_custom_pre_pass=Mine()):
            assert watch.uuid() == watch.uuid() == manager.manager.uuid()
    assert [record.getMessage() for record in caplog.records] == [manager.REPLACED]


# ---- fresh processes
SCRIPT = Path(__file__).with_name("fresh_process.py")


def in_fresh_process(*what, **environment):
    """By name of each compilation: the gradient's sum, calls packed, cache hits; and what the process logged."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    run = subprocess.run(
        [sys.executable, str(SCRIPT), *what], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = [line.split()[1:] for line in run.stdout.splitlines() if line.startswith("RESULT")]
    return {name: (float(total), int(packed), int(hits)) for name, total, packed, hits in found}, run.stderr


@pytest.mark.slow
def test_processes_that_share_a_cache(tmp_path):
    """The first call of a process, compiled, is packed; a warm cache is used; no code is stale; all is reported."""
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TORCH_LOGS": "inductor_passes"}
    trace = tmp_path / "trace"
    first, log = in_fresh_process("same", "dropped", TORCH_TRACE=str(trace), **cache)
    total, *rest = first["same"]
    assert rest == [1, 0]
    assert first["dropped"] == (pytest.approx(total), 0, 0)
    table = ["toy::attention", "yes", "packed", "fresh_process.py:"]
    assert any(all(word in line for word in table) for line in log.splitlines()), log
    assert "1 of 1 packed" in log
    assert "inductor_passes.manager.chain(your_pass)" in log, "the pass was dropped, and calls were in the graph"
    traced = "".join(path.read_text() for path in trace.iterdir())
    assert '"inductor_passes_report"' in traced
    assert "1 of 1 packed" in traced

    second, log = in_fresh_process("same", "dropped", "formula", "fake", **cache)
    assert second["same"][:2] == (total, 0), "the rewritten graph itself is what was cached"
    assert second["same"][2] > 0, "the cache is warm, and used"
    assert second["dropped"][2] > 0
    assert manager.REPLACED in log
    # Only the new formula's gradient is three times the old one; code for the old fake's shapes would have failed.
    assert second["formula"] == (pytest.approx(3 * total), 1, 0)
    assert second["fake"] == (total, 1, 0)


def test_switched_off_by_the_environment():
    code = "import inductor_passes; print(inductor_passes.settings.current().enabled)"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "INDUCTOR_PASSES": "0"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.strip() == "False"


@pytest.mark.slow
def test_ahead_of_time_inference_runs_the_forward_passes(tmp_path):
    spelling = SPELLINGS["repeat_interleave"]
    torch.manual_seed(0)
    layer, x = Layer(spelling), make_input(spelling)
    before = inductor_passes.counters["grouped_heads"]
    # One small package is compiled faster than the headers that it includes.
    with torch.no_grad(), inductor_config.patch({"aot_inductor.precompile_headers": False}):
        program = torch.export.export(layer, (x,))
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "toy.pt2"))
        assert torch.equal(torch._inductor.aoti_load_package(package)(x), layer(x))
    assert inductor_passes.counters["grouped_heads"] == before + 1
