"""Drop-in parts for other libraries, each imported by its own name."""

__all__: list[str] = []
