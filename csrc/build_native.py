"""Describe the extension module `unifiedpool._up_native` to cffi.

The declarations come from the headers themselves, so that there is one source of them: comments and preprocessor lines
are dropped, but `#define NAME <integer>` stays.

Environment:
    UNIFIEDPOOL_SANITIZE  a list for -fsanitize, such as `address,undefined`; also turns the asserts on
    UNIFIEDPOOL_ASSERTS   `1`: asserts on, still optimised
"""

import os
import platform
import re
from pathlib import Path

import cffi

HEADERS = ("grids.h", "plan.h", "prefix_tree.h", "two_ended.h")
SOURCES = ("grids.c", "plan.c", "prefix_tree.c", "two_ended.c")
FOLDER = Path(__file__).resolve().parent


def declarations(header: str) -> str:
    """Return the text of one header as cffi's cdef takes it."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", header, flags=re.DOTALL)
    text = text.replace("\\\n", " ")
    kept = []
    for line in text.splitlines():
        if not line.lstrip().startswith("#"):
            kept.append(line)
        elif match := re.match(r"\s*#\s*define\s+(\w+)\s+\(?(-?(?:0x[0-9a-fA-F]+|\d+))[uUlL]*\)?\s*$", line):
            kept.append(f"#define {match[1]} {match[2]}")
    return "\n".join(kept)


def compile_options() -> dict[str, list[str]]:
    """Return the keyword arguments of set_source that the environment asks for."""
    sanitize = os.environ.get("UNIFIEDPOOL_SANITIZE", "")
    asserts = bool(sanitize) or os.environ.get("UNIFIEDPOOL_ASSERTS") == "1"
    macros = {"undef_macros": ["NDEBUG"]} if asserts else {"define_macros": [("NDEBUG", None)]}
    # The warnings that are errors in CI are in the Makefile: the file that cffi generates does not pass all of them.
    # Python is often built with -fwrapv, and its flags come first; nothing here relies on it, and it costs a tenth.
    flags = ["-std=c11", "-Wall", "-fvisibility=hidden", "-fno-wrapv"]
    if platform.machine() in {"x86_64", "AMD64"}:
        # Counting bits, and the unsigned minimum of a vector: in every 64-bit x86 since 2011, but off by default.
        flags += ["-mpopcnt", "-msse4.2"]
    if not sanitize:
        return {"extra_compile_args": [*flags, "-O3"], **macros}
    option = f"-fsanitize={sanitize}"
    return {
        "extra_compile_args": [*flags, "-O1", "-g", "-fno-omit-frame-pointer", option, "-fno-sanitize-recover=all"],
        "extra_link_args": [option],
        **macros,
    }


# The sources' paths are relative to the project's root, where setup.py runs: distutils wants them so.
ffibuilder = cffi.FFI()
for name in HEADERS:
    ffibuilder.cdef(declarations((FOLDER / name).read_text(encoding="utf-8")))
ffibuilder.set_source(
    "unifiedpool._up_native",
    "\n".join(f'#include "{name}"' for name in HEADERS),
    sources=[f"csrc/{name}" for name in SOURCES],
    depends=[f"csrc/{path.name}" for path in sorted(FOLDER.glob("*.[ch]"))],
    include_dirs=["csrc"],
    py_limited_api=True,
    **compile_options(),
)
