# The declarations are csrc/*.h; unifiedpool._native gives them types.
from typing import Any

ffi: Any
lib: Any
