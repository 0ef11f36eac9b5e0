"""`python -m unifiedpool` is the `unifiedpool` command."""

from __future__ import annotations

from .cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
