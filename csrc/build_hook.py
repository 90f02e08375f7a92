"""Compile `csrc/` into the package while it is built or installed.

Without a C compiler, what is built has no library: models then run as `models.native` says.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno")


class ProductsHook(BuildHookInterface):
    """Adds the library to a wheel, which then is one platform's, of any Python."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        target = root / "src" / "beamwright" / "_products.so"
        compiler = shutil.which(os.environ.get("CC", "cc"))
        if self.target_name != "wheel" or compiler is None:
            return
        sources = map(str, sorted((root / "csrc").glob("*.c")))
        command = [compiler, *_FLAGS, "-o", str(target), *sources, "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            self.app.display_warning(f"no library of products: {done.stderr.strip()}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["artifacts"].append("src/beamwright/_products.so")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
