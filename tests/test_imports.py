"""Who may import whom, read from the source, and what importing the packages must not load."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gdn_ops", "inductor_passes")

# Each module's layer: a module may import its own layer's folder and every lower layer named for it, nothing else.
# Written as the set of this project's modules that it may import ("x.*" is a folder).
FOUNDATION = [
    "gdn_ops.derivatives",
    "gdn_ops.shapes",
    "gdn_ops.outputs",
    "gdn_ops.settings",
    "gdn_ops.counters",
    "gdn_ops.plain",
    "gdn_ops.version",
]
LAUNCHES = ["gdn_ops.backends.early", "gdn_ops.backends.launching", "gdn_ops.backends.plans"]
PUBLIC = ["gdn_ops", "gdn_ops.functional", "gdn_ops.reference", "gdn_ops.memory", "gdn_ops.context_parallel.*"]
ALLOWED = {
    "gdn_ops.version": [],
    "gdn_ops.derivatives": [],
    "gdn_ops.counters": [],
    "gdn_ops.plain": ["gdn_ops.settings"],
    "gdn_ops.reference": [],
    "gdn_ops.shapes": [],
    "gdn_ops.settings": ["gdn_ops.shapes"],
    "gdn_ops.outputs": ["gdn_ops.settings", "gdn_ops.shapes"],
    "gdn_ops.checks": FOUNDATION,
    "gdn_ops.backends.*": FOUNDATION,
    "gdn_ops.backends.early": [],
    "gdn_ops.backends.launching": ["gdn_ops.backends.early"],
    "gdn_ops.backends.plans": ["gdn_ops.backends.launching"],
    "gdn_ops.backends.triton.*": [*FOUNDATION, "gdn_ops.backends.triton.*", *LAUNCHES],
    "gdn_ops.backends.hopper.*": [*FOUNDATION, "gdn_ops.backends.hopper.*", *LAUNCHES],
    "gdn_ops.repeats": FOUNDATION,
    "gdn_ops.ops": [*FOUNDATION, "gdn_ops.checks", "gdn_ops.repeats"],
    "gdn_ops.packing": [*FOUNDATION, "gdn_ops.checks", "gdn_ops.ops", "inductor_passes.*"],
    "gdn_ops.autograd": [*FOUNDATION, "gdn_ops.checks", "gdn_ops.ops", "gdn_ops.packing"],
    "gdn_ops.functional": [
        *FOUNDATION,
        *("gdn_ops.checks", "gdn_ops.ops", "gdn_ops.autograd", "gdn_ops.packing", "gdn_ops.context_parallel.*"),
    ],
    "gdn_ops.context_parallel.*": [
        *FOUNDATION,
        *("gdn_ops.checks", "gdn_ops.repeats", "gdn_ops.ops", "gdn_ops.autograd", "gdn_ops.packing"),
        "gdn_ops.context_parallel.*",
    ],
    "gdn_ops.context_parallel.example": PUBLIC,
    "gdn_ops.memory": [*FOUNDATION, "gdn_ops.checks"],
    "gdn_ops.testing": [*FOUNDATION, *PUBLIC],
    "gdn_ops.integrations.*": [*PUBLIC, "gdn_ops.integrations.*"],
    "gdn_ops.demo": [*PUBLIC, "gdn_ops.integrations.*", "inductor_passes.*"],
    "gdn_ops.bench.*": [
        *FOUNDATION,
        *PUBLIC,
        "gdn_ops.ops",
        "gdn_ops.testing",
        "gdn_ops.integrations.*",
        "gdn_ops.bench.*",
    ]
    + ["inductor_passes.*"],
    "gdn_ops": [
        "gdn_ops.context_parallel.*",
        *FOUNDATION,
        *("gdn_ops.functional", "gdn_ops.autograd", "gdn_ops.packing", "gdn_ops.ops", "gdn_ops.memory"),
        "inductor_passes.*",
    ],
    # The passes know nothing of GDN.
    "inductor_passes.*": ["inductor_passes.*"],
}
# Optional packages, each imported only in its own folder or file.
ONLY_IN = {
    "triton": [
        *("gdn_ops.backends.triton.*", "gdn_ops.backends.hopper.*", *LAUNCHES),
        *("gdn_ops.bench.report", "gdn_ops.bench.providers"),  # its version; its errors
    ],
    "transformers": ["gdn_ops.integrations.transformers", "gdn_ops.demo", "gdn_ops.bench.*"],
    "tqdm": ["gdn_ops.demo", "gdn_ops.bench.*"],
    "matplotlib": ["gdn_ops.demo", "gdn_ops.bench.*"],
    "fla": ["gdn_ops.bench.*"],
}


def _modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


def _matches(name: str, pattern: str) -> bool:
    folder = pattern.removesuffix(".*")
    return name == folder or (pattern.endswith(".*") and name.startswith(folder + "."))


def _imports(name: str, tree: ast.Module) -> set[str]:
    """Every module that a source file imports, at any depth of nesting; `from package import module` counts as both."""
    found = set()
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, *([base] if base else [])])
            modules = {f"{base}.{alias.name}" for alias in node.names} & MODULES.keys()
            # `from gdn_ops import shapes` is an import of gdn_ops.shapes, not a use of gdn_ops' own names.
            found.update(modules)
            if len(modules) < len(node.names):
                found.add(base)
    return found


def test_every_module_has_a_place_in_the_import_order():
    assert MODULES
    homeless = [name for name in MODULES if not any(_matches(name, pattern) for pattern in ALLOWED)]
    assert not homeless


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_downward(name):
    # The longest pattern that matches is the module's own.
    pattern = max((p for p in ALLOWED if _matches(name, p)), key=len)
    for imported in _imports(name, ast.parse(MODULES[name].read_text())):
        top = imported.partition(".")[0]
        if top in PACKAGES:
            assert any(_matches(imported, allowed) for allowed in ALLOWED[pattern]), f"{name} imports {imported}"
        elif top in ONLY_IN:
            assert any(_matches(name, allowed) for allowed in ONLY_IN[top]), f"{name} imports {imported}"


def test_backends_are_named_only_at_call_time():
    """No module names a backend in an import statement: `ops` loads the one it needs when it is called."""
    for name, path in MODULES.items():
        for imported in _imports(name, ast.parse(path.read_text())):
            if _matches(imported, "gdn_ops.backends.*") and not name.startswith("gdn_ops.backends"):
                raise AssertionError(f"{name} imports {imported}")


def test_only_settings_reads_the_environment():
    readers = {"gdn_ops.settings", "inductor_passes.settings", "gdn_ops.demo", "gdn_ops.bench"}
    readers |= {"gdn_ops.context_parallel.example"}  # torchrun's own variables
    for name, path in MODULES.items():
        if name in readers or name.startswith("gdn_ops.bench."):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
                raise AssertionError(f"{name}:{node.lineno} reads the environment")


# ---- fresh processes

BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("triton", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
"""


def _fresh_process(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_cold_import_is_light():
    """Neither triton nor transformers, no kernel, no Inductor: importing costs little more than importing torch."""
    code = """
import torch
before = set(sys.modules)
import gdn_ops
loaded = set(sys.modules) - before
assert not any(name.startswith(("torch._inductor", "torch._dynamo")) for name in loaded), sorted(loaded)
assert not any(name.startswith("gdn_ops.backends.") for name in loaded), sorted(loaded)
assert not {"triton", "transformers", "sympy", "numpy"} & loaded, sorted(loaded)
print(sorted(torch.ops.gdn.chunk_fwd.overloads()))
"""
    assert _fresh_process(BLOCK + code) == "['default']\n"


def test_cpu_path_needs_neither_triton_nor_transformers():
    code = """
import torch, gdn_ops
q, k, v = (torch.randn(1, 70, heads, 8, requires_grad=True) for heads in (1, 1, 2))
g, beta = -torch.rand(1, 70, 2), torch.rand(1, 70, 2)
o, _ = gdn_ops.chunk_gated_delta_rule(q, k, v, g, beta)
o.square().sum().backward()
assert o.abs().sum() > 0 and q.grad.abs().sum() > 0
assert "gdn_ops.backends.cpu" in sys.modules and "triton" not in sys.modules
"""
    _fresh_process(BLOCK + code)


def test_benchmark_command_needs_no_triton():
    code = """
from gdn_ops.bench import __main__, providers
assert "triton" not in sys.modules and RuntimeError in providers.FAILURES
"""
    _fresh_process(BLOCK + code)


@pytest.mark.slow
def test_first_call_may_be_compiled(tmp_path):
    """A process whose first GDN call ever is a compiled one, fullgraph, gets the eager bits and a packed gradient."""
    code = """
import sys, torch, gdn_ops

def layer(row, g, beta):
    q, k, v = row.split([16, 16, 32], dim=-1)
    heads = (q.unflatten(-1, (2, 8)), k.unflatten(-1, (2, 8)), v.unflatten(-1, (4, 8)))
    return gdn_ops.chunk_gated_delta_rule(*heads, g, beta)[0]

torch.manual_seed(0)
weight = (torch.randn(64, 64) * 0.05).requires_grad_()
x, g, beta = torch.randn(1, 70, 64), -torch.rand(1, 70, 4), torch.rand(1, 70, 4)
assert "gdn_ops.backends.cpu" not in sys.modules
out = torch.compile(lambda: layer(x @ weight, g, beta), fullgraph=True)()
out.square().sum().backward()
assert gdn_ops.stats().packed_gradients == 1, gdn_ops.stats()
expected = layer(x @ weight, g, beta)
torch.testing.assert_close(out, expected)
"""
    _fresh_process(code, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
