"""Makes this folder's `problems` importable: test files are imported by path and see no package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
