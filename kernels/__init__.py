"""Operations on cells, one a file: a Triton kernel, its host wrapper, and the plain torch reference in `naive`."""

if __name__ != "unifiedpool.kernels":
    # Imported from the root of a checkout this would be a second copy, with caches of its own.
    raise ImportError(f"import unifiedpool.kernels, not {__name__}")

__all__: list[str] = []
