"""Operations on cells, one a file: a Triton kernel, its host wrapper, and the plain torch reference in `naive`."""

__all__: list[str] = []

if __name__ != "unifiedpool.kernels":
    # Imported from the root of a checkout this would be a second copy, with caches of its own: nothing in it may be
    # used. The bare import has to succeed, because transformers looks for a package of this name by importing it.
    __path__ = []

    def __getattr__(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(f"import unifiedpool.kernels, not {__name__}")
