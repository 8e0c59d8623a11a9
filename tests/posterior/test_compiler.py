"""torch.compile is told about hooks when it is first imported, and not imported for it."""

import subprocess
import sys

PROGRAM = """
import sys
import torch, undrift
undrift.perturb(torch.nn.Sequential(torch.nn.Linear(2, 2)))
assert "torch._dynamo" not in sys.modules, "perturb imported the compiler"
import torch._dynamo
assert torch._dynamo.config.skip_nnmodule_hook_guards is False, "the compiler was not told"
assert not any("undrift" in type(finder).__module__ for finder in sys.meta_path), "the finder stayed"
"""


def test_perturb_leaves_the_compiler_alone_until_somebody_imports_it() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], check=True)
