"""Training from a run file: what `gpipe train` does."""

__all__: list[str] = []
