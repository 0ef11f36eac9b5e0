"""Builds the C core. Everything else is in pyproject.toml."""

import shutil

from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, PlatformError

NEEDS = (
    "unifiedpool's core is C: building it needs a C11 compiler and Python's headers "
    "(Debian and Ubuntu: apt install build-essential python3-dev; Fedora: dnf install gcc python3-devel; "
    "macOS: xcode-select --install). The variable CC names another compiler."
)


class BuildNative(build_ext):
    """Build the extension, and say what is missing when that fails."""

    def build_extensions(self) -> None:
        """Check that there is a compiler, then build."""
        command = getattr(self.compiler, "compiler_so", None)
        if command and shutil.which(command[0]) is None:
            raise PlatformError(f"the C compiler {command[0]!r} was not found. {NEEDS}")
        try:
            super().build_extensions()
        except CompileError as error:
            raise CompileError(f"{error}\nThe C core did not compile; the compiler says why above. {NEEDS}") from error


setup(
    cffi_modules=["csrc/build_native.py:ffibuilder"],
    cmdclass={"build_ext": BuildNative},
    # cffi builds the extension against the limited API; this gives the wheel the tag that says so.
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
