"""What hatchling cannot know: the C kernels of a wheel, and the README of a package index.

Without a C compiler the package is still installed, and says at run time that it is slower; pip
shows the warning of the build with `-v` only.
"""

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

KERNELS = Path("src", "foretoken", "kernels")


def _load(path: Path) -> ModuleType:
    """The module at `path`, without importing the package around it."""
    spec = importlib.util.spec_from_file_location(f"foretoken_{path.stem}", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class KernelHook(BuildHookInterface):  # type: ignore[type-arg]
    """Of the wheel target."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; a wheel then fits this platform only, whatever its Python."""
        build = _load(Path(self.root) / KERNELS / "build.py")
        try:
            library = build.build_library()
        except build.BuildError as error:
            self.app.display_warning(
                f"The kernels were not compiled, and decoding will be many times slower. {error}"
            )
            return
        if version == "editable":
            return
        tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{tag}"
        build_data["force_include"][str(library)] = f"foretoken/kernels/lib/{library.name}"


class ReadmeHook(MetadataHookInterface):
    """Of the metadata: the field `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """README.md with links that work where it is shown."""
        index_readme = _load(Path(self.root, "scripts", "index_readme.py"))
        text = Path(self.root, "README.md").read_text("utf-8")
        repository = metadata.get("urls", {}).get("Repository")
        shown = index_readme.for_index(text, repository)
        metadata["readme"] = {"content-type": "text/markdown", "text": shown}
